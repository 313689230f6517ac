"""What can be asked of a peer, said before anything starts: a peer does less than a pool, and never silently."""

from __future__ import annotations

from importlib.util import find_spec

from coresident.engines.pool.base import base
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.peers.smolvm import prerequisites
from coresident.engines.pool.quantised import checkpoint
from coresident.errors import UserError

PEERS = ("trl", "smolvm")
# What smolvm's training script has fixed; it cannot be told otherwise.
FIXED_BY_SMOLVM = {
    "dtype": "bfloat16",
    "optimizer": "adamw8bit",
    **{
        name: DPO.model_fields[name].default
        for name in ("learning_rate", "rank", "alpha", "targets", "seed", "weight_decay", "clip")
    },
}


def check(parameters: DPO) -> None:
    """Raise UserError for what a peer cannot do, or lacks. Nothing to say of the pool's own ways of sharing."""
    if parameters.sharing not in PEERS:
        if parameters.smolvm is not None:
            raise UserError(
                f"smolvm is set and sharing is {parameters.sharing}",
                "set sharing: smolvm, or leave smolvm out",
            )
        return
    check_only_measured(parameters)
    if parameters.sharing == "trl":
        quantised = _quantised(parameters)
        _installed(parameters, quantised)
        _in_its_dtypes(parameters, quantised)
    else:
        _as_its_harness(parameters)
        prerequisites.of(parameters)


def check_only_measured(parameters: DPO) -> None:
    """Raise UserError for more than a peer does, which is an arm of a measurement: never resumed, evaluated or continued."""
    asked = {
        "loss": parameters.loss != "dpo",
        "schedule": parameters.schedule != "together",
        "start_from": parameters.start_from is not None,
        "checkpoint_every": parameters.checkpoint_every > 0,
        "eval_files": bool(parameters.eval_files),
        "on_failure": parameters.on_failure != "stop",
        "held_to": parameters.held_to is not None,
    }
    for name, set_ in asked.items():
        if set_:
            raise UserError(
                f"sharing: {parameters.sharing} does not know {name}: {getattr(parameters, name)}",
                f"leave {name} out, or use sharing: none or fork",
            )


def _quantised(parameters: DPO) -> str | None:
    """In which dtype bitsandbytes computes over this base, if it is one in 4 bits."""
    if parameters.base.path is not None:
        config = base.read(base.source(parameters.base, parameters.dtype)).config
        if checkpoint.quantised(config):
            told = config["quantization_config"].get("bnb_4bit_compute_dtype") or "float32"
            return str(told).removeprefix("torch.")
    return checkpoint.COMPUTED_IN if parameters.base.quantise != "none" else None


def _in_its_dtypes(parameters: DPO, quantised: str | None) -> None:
    """bitsandbytes casts a base's biases to what it computes in, in place; then they are another base's."""
    if quantised not in (None, parameters.dtype):
        raise UserError(
            f"sharing: trl computes in {quantised} over this 4-bit base, and dtype is {parameters.dtype}",
            f"set dtype: {quantised} for all arms that are compared with it",
        )
    if parameters.dtype == "float64":
        raise UserError(
            "sharing: trl loads no base in float64",
            "set dtype: float32 or bfloat16 for all arms that are compared with it",
        )


def _installed(parameters: DPO, quantised: str | None) -> None:
    needs = dict.fromkeys(("trl", "datasets", "accelerate"), "sharing: trl")
    if quantised:
        needs["bitsandbytes"] = "sharing: trl on a 4-bit base"
    elif parameters.optimizer == "adamw8bit":
        needs["bitsandbytes"] = "sharing: trl with optimizer: adamw8bit"
    for name, who in needs.items():
        if find_spec(name) is None:
            ours = "'coresident[peers]'" if who == "sharing: trl" else name
            raise UserError(
                f"{who} needs the package {name}, which is not installed",
                f"pip install {ours}, or leave that arm out",
            )


def _as_its_harness(parameters: DPO) -> None:
    """Refuse what smolvm's own training script would not do as asked."""
    for name, fixed in FIXED_BY_SMOLVM.items():
        if getattr(parameters, name) != fixed:
            raise UserError(
                f"sharing: smolvm trains with its own script's {name} ({fixed}), not {getattr(parameters, name)}",
                f"set {name}: {fixed} for all arms that are compared with it",
            )
    for name in ("own", "passes"):
        if getattr(parameters, name):
            raise UserError(
                f"sharing: smolvm has no {name}: its learners differ in their data only", f"leave {name} out"
            )
    if parameters.data.source != "arithmetic":
        raise UserError(
            f"sharing: smolvm makes its own arithmetic pairs, and data.source is {parameters.data.source}",
            "set data: {source: arithmetic} for all arms that are compared with it",
        )
    if parameters.mps == "on":
        raise UserError("sharing: smolvm shares a card in its own way, without MPS", "leave mps out")
