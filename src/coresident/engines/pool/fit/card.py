"""What a process takes of a card beside its allocator's memory, measured on an H200 (driver 580.159, CUDA 13.0, PyTorch
2.11): the published records, where each figure was the same in every repetition.

A context with the kernels that a training loads is most of it. Another card's, another driver's or another PyTorch's
may differ by some tens of MiB a process.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Contexts:
    """Bytes: of a `learner` over a base that another process holds, what it adds to the card at the barrier, less what its
    allocator reserves; of one that is `loading` a base of its own, the same; of the `golden` process, what is in use with
    the learners gone, less the base.
    """

    learner: float
    loading: float
    golden: float


def contexts(mps: bool, deterministic: bool) -> Contexts:
    """What processes take. A deterministic run's take less: cuBLAS has its fixed workspace instead of one of its own, and the
    kernels of fused attention are never loaded.
    """
    return _CONTEXTS[mps, deterministic]


# evidence/h200/pool-scale: 4319.6 - 3554.0, 7336.3 - 6500.0, 3755.8 - 2944.4; under MPS 4314.8 - 3554.0, 7331.0 - 6500.0,
# 3822.6 - 2944.4 - MPS_SERVER. Deterministic, evidence/h200/pool-fidelity with 8 learners: (24433.4 - 1722.8 - 17226.0) / 8,
# (30837.9 - 24788.0) / 8, 1722.8 - 942.3; under MPS (24462.4 - 1789.9 - 17226.0) / 8, 1789.9 - 942.3 - MPS_SERVER.
_CONTEXTS = {
    (False, False): Contexts(765.6 * MIB, 836.3 * MIB, 811.4 * MIB),
    (True, False): Contexts(760.8 * MIB, 831.0 * MIB, 803.6 * MIB),
    (False, True): Contexts(685.6 * MIB, 756.2 * MIB, 780.5 * MIB),
    # Loading a base under MPS was not measured: what MPS changes where a run is not deterministic.
    (True, True): Contexts(680.8 * MIB, 750.9 * MIB, 773.0 * MIB),
}
MPS_SERVER = 74.6 * MIB
# A pack, whatever its number of learners (evidence/h200/pool-high-n: 35532.8 - 34746.0 with 64 of them, and as much with
# 16 and 32; in pool-speed, unquantised and kept whole, 778.8).
PACK = 786.8 * MIB
