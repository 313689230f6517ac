"""What a base can be asked for, told from its files before any process starts: which layers, and how long rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from coresident.engines.pool.base import base, shapes
from coresident.engines.pool.parameters import DPO
from coresident.errors import UserError, nearest

# How configurations of transformers call it.
_POSITIONS = ("max_position_embeddings", "n_positions")
# Experts as files have them, one by one; transformers holds those of a layer in one tensor.
_EXPERT = re.compile(r"\.experts\.\d+\.")
# A layer that has no tensor of its own in the files where it is tied to the embedding.
_OUTPUT = "lm_head"


def check(parameters: DPO) -> None:
    """Raise UserError where the base has not the layers of `targets`, or a context below a `max_length`."""
    named, config, names = _described(parameters)
    _check_layers(named, names, parameters.targets)
    _check_length(named, config, parameters)


def check_length(parameters: DPO) -> None:
    """Raise UserError where a `max_length` is above the base's context."""
    named, config, _ = _described(parameters)
    _check_length(named, config, parameters)


def positions(config: Mapping[str, Any]) -> int | None:
    """The longest row that a base was made for, as its config.json says; None where it does not."""
    found = [config[name] for name in _POSITIONS if isinstance(config.get(name), int)]
    return found[0] if found else None


def row(config: Mapping[str, Any]) -> int:
    """How many tokens a row has at most where it is not said: the pool's default, or the base's context if that is less."""
    usual = int(DPO.model_fields["max_length"].default)
    return max(8, min(usual, positions(config) or usual))


def _described(parameters: DPO) -> tuple[str, Mapping[str, Any], Collection[str]]:
    choice = parameters.base
    if choice.config is not None:
        config = shapes.SHAPES[choice.config]
        return f"the base {choice.config}", config, [one.name for one in shapes.weights(config)]
    found = base.read(base.source(choice, parameters.dtype))
    return f"the base {found.path}", found.config, [one.name for one in found.tensors]


def _check_layers(named: str, names: Collection[str], targets: Collection[str]) -> None:
    if any(_EXPERT.search(name) for name in names):
        raise UserError(
            f"{named} is a Mixture of Experts, and adapters are trained over dense models only",
            "give the directory of a dense model (--base, base.path)",
        )
    layers = {name.rpartition(".weight")[0] for name in names if ".weight" in name}
    for target in targets:
        if target != _OUTPUT and not any(f".{layer}".endswith(f".{target}") for layer in layers):
            known = {name for layer in layers if not (name := layer.rpartition(".")[2]).isdigit()}
            raise UserError(
                f"targets: {named} has no layer {target!r} to adapt",
                f"{nearest(target, {one for one in known if 'norm' not in one})} (--set targets=[...])",
            )


def _check_length(named: str, config: Mapping[str, Any], parameters: DPO) -> None:
    most = positions(config)
    longest = max(parameters.of(learner).max_length for learner in range(parameters.learners))
    if most is not None and longest > most:
        raise UserError(
            f"max_length {longest} is more than the context of {named} ({most} tokens)",
            f"set max_length to {most} or less (--set max_length={most}): longer rows are cut to it",
        )
