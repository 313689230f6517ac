"""What the tensors of a 4-bit weight are called in a file: beside `X.weight`, the packed numbers, what they stand for."""

from __future__ import annotations

STATE = ".quant_state.bitsandbytes__nf4"
KEPT = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


def is_state(name: str) -> bool:
    """Whether a tensor belongs to how another one is quantised, and is held as it is stored, whatever the run's type."""
    return name.endswith((STATE, *(f".weight{part}" for part in KEPT)))
