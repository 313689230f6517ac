"""The recipe that was asked for, with everything filled in that follows from the preset, and its identity.

Where a training may go on is decided by what its numbers mean, not by how they are computed: the identity covers model, data,
optimiser, schedule, budget, batch, seed and precision, and, of a mixture whose experts are balanced, the microbatch. A value that
is the default of its setting is left out of it, so that a setting that is added later leaves the identities of older trainings
as they were.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coresident.engines.pretrain.course import Course
from coresident.engines.pretrain.outcomes import smaller
from coresident.engines.pretrain.parameters import Budget, Optimiser, Runtime, Train
from coresident.errors import UserError, located
from coresident.model.huggingface_config import config_of
from coresident.model.presets import preset
from coresident.model.shape import ModelShape, parameters_of

if TYPE_CHECKING:
    from coresident.text.cache import TokenCache


@dataclass(frozen=True)
class Defaults:
    """What a preset's recipe says where the user does not."""

    learning_rate: float
    beta2: float
    batch_tokens: int
    microbatch: int
    per_parameter: float = 20.0
    subset: int = 1_048_576
    threads: int | None = None


# 20m: of the published sweep at 131,072 targets an update (its first campaign, at 32,768, chose 0.001 and 0.95). 50m and 90m: of
# that first campaign. 250m and 500m were never tuned. The rest are ours, and only meant to learn something soon on a CPU.
# So small a model is faster on one thread than on two, which wait for each other, and much faster on a machine that is not quiet.
DEFAULTS: Mapping[str, Defaults] = {
    "20m": Defaults(0.0056, 0.98, 131_072, 128),
    "50m": Defaults(0.001, 0.99, 32_768, 32),
    "90m": Defaults(0.001, 0.99, 32_768, 32),
    "250m": Defaults(0.001, 0.99, 8_192, 8),
    "500m": Defaults(0.001, 0.99, 8_192, 8),
    "smoke": Defaults(0.01, 0.98, 2_048, 16, 2.0, 16_384, 1),
    "moe-smoke": Defaults(0.01, 0.98, 2_048, 16, 2.0, 16_384, 1),
    "moe-64": Defaults(0.001, 0.99, 32_768, 32),
}
PRESET = "smoke"
# Of a shape of one's own: sequences of an update.
SEQUENCES = 32


@dataclass(frozen=True)
class Recipe:
    """A training without open questions. `settings` has no None left in `optimiser`, `batch_tokens`, `microbatch` and
    `validation`; `precision` is that of the products, `cache` the identity of the data.
    """

    settings: Train
    shape: ModelShape
    course: Course
    precision: str
    cache: str

    @property
    def blocks_per_update(self) -> int:
        """Sequences of a full update."""
        assert self.settings.batch_tokens is not None
        return self.settings.batch_tokens // self.shape.context

    @property
    def microbatch(self) -> int:
        """Sequences that are computed at once."""
        assert self.settings.microbatch is not None
        return self.settings.microbatch

    def less_memory(self) -> str:
        """What to do where memory runs out in an update."""
        return smaller("microbatch", self.microbatch, self.blocks_per_update)

    def identity(self) -> dict[str, str]:
        """What a checkpoint belongs to: each setting that is not at its default, as JSON."""
        settings, mixture = self.settings, self.shape.mixture
        usual = min(_defaults(settings, self.shape).microbatch, self.blocks_per_update)
        told: dict[str, Any] = {
            "data": self.cache,
            "shape": self.shape.model_dump(mode="json", exclude_defaults=True),
            "optimiser": settings.optimiser.model_dump(mode="json", exclude_defaults=True),
            "schedule": settings.schedule.model_dump(mode="json", exclude_defaults=True),
            "budget": {
                "blocks": self.course.blocks,
                "virtual_epochs": self.course.epochs,
                "grain": self.course.grain,
            },
            "batch_tokens": settings.batch_tokens,
            "seed": settings.seed,
            "precision": self.precision,
            # Balance is a product of two means over a microbatch: of other microbatches it is another loss.
            **(
                {"microbatch": self.microbatch}
                if mixture and mixture.balance and self.microbatch != usual
                else {}
            ),
        }
        return dict(_flat(told))


def digest(identity: Mapping[str, str]) -> str:
    """One hash of an identity."""
    return hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()


# What the budget's own settings come to, for those who never set these.
_SAID = {
    "budget.blocks": "the budget (updates, targets or per_parameter), in blocks of a context's targets,",
    "budget.grain": "what the budget is rounded to (one update of budget.updates, or a block)",
}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is not the same, in words, in the order of the settings' names."""
    return [
        f"{_SAID.get(name, name)} was {before.get(name, 'the default')} and is now {now.get(name, 'the default')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def shape_of(settings: Train) -> ModelShape:
    """The model's shape. Raises UserError for a preset that does not exist."""
    return settings.shape if settings.shape is not None else preset(settings.preset or PRESET)


def check_vocabulary(cache: TokenCache, shape: ModelShape) -> None:
    """Raise UserError where the cache holds tokens that the model has no place for."""
    if cache.vocabulary > shape.vocabulary:
        raise UserError(
            f"the cache {cache.path} has {cache.vocabulary} tokens, and the model's table only {shape.vocabulary}",
            f"prepare it with vocabulary={shape.vocabulary}, or train a model with a larger one",
        )


def runtime_of(settings: Train) -> Runtime:
    """How it is executed, with the preset's number of threads where none is given."""
    runtime = settings.runtime
    threads = runtime.threads or _defaults(settings, shape_of(settings)).threads
    return runtime.model_copy(update={"threads": threads})


def resolve(settings: Train, cache: str, precision: str) -> Recipe:
    """Fill in the preset's defaults. `cache` is the identity of the data, `precision` what `auto` became.

    Raises UserError for a shape that transformers does not have, and for a batch that is no whole number of sequences or of
    microbatches.
    """
    shape = shape_of(settings)
    with located("shape"):
        # What no export could hand on is refused before it is trained.
        config_of(shape)
    known = _defaults(settings, shape)
    batch = settings.batch_tokens or known.batch_tokens
    if batch % shape.context:
        below = max(1, batch // shape.context) * shape.context
        raise UserError(
            f"batch_tokens {batch} is no whole number of sequences of {shape.context} targets",
            f"set batch_tokens to {below} or {below + shape.context}",
        )
    blocks = batch // shape.context
    microbatch = min(known.microbatch, blocks) if settings.microbatch is None else settings.microbatch
    if blocks % microbatch:
        fits = max(one for one in range(1, min(microbatch, blocks) + 1) if blocks % one == 0)
        raise UserError(
            f"microbatch {microbatch} does not divide the {blocks} sequences of an update",
            f"set microbatch to {fits}, or batch_tokens to a multiple of {microbatch * shape.context}",
        )
    optimiser = Optimiser.model_validate(
        {
            **settings.optimiser.model_dump(),
            "learning_rate": settings.optimiser.learning_rate or known.learning_rate,
            "beta2": known.beta2 if settings.optimiser.beta2 is None else settings.optimiser.beta2,
        }
    )
    with located("budget"):
        course = _course(settings.budget, shape, blocks, known.per_parameter)
    subset = known.subset if settings.validation.subset is None else settings.validation.subset
    validation = settings.validation.model_copy(update={"subset": subset})
    filled = {
        "optimiser": optimiser,
        "batch_tokens": batch,
        "microbatch": microbatch,
        "validation": validation,
    }
    return Recipe(settings.model_copy(update=filled), shape, course, precision, cache)


def _defaults(settings: Train, shape: ModelShape) -> Defaults:
    if settings.shape is None:
        return DEFAULTS[settings.preset or PRESET]
    return Defaults(0.001, 0.95, SEQUENCES * shape.context, SEQUENCES)


def _course(budget: Budget, shape: ModelShape, batch: int, per_parameter: float) -> Course:
    if budget.updates is not None:
        # Asked for as full updates, so none is cut short.
        return Course(budget.updates * batch, min(budget.virtual_epochs, budget.updates), batch, grain=batch)
    targets = budget.targets
    if targets is None:
        targets = math.ceil(parameters_of(shape) * (budget.per_parameter or per_parameter))
    blocks = math.ceil(targets / shape.context)
    updates = math.ceil(blocks / batch)
    return Course(blocks, min(budget.virtual_epochs, updates), batch)


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [
            pair for key, inner in value.items() for pair in _flat(inner, f"{name}.{key}" if name else key)
        ]
    return [(name, json.dumps(value))]
