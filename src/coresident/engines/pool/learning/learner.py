"""One learner: the training step that every arm runs, whatever its base is shared with.

Everything that could differ from run to run is fixed here: the order of samples comes with the batches, the
optimiser's loops are the plain ones on a CPU and the fused ones on a GPU, and there is no dropout. On one thread
of one machine the series are equal bit for bit.

A GPU is waited for once a step, before the optimiser's: loss, gradient norm and all figures come over in one
transfer, and what is not finite is seen before anything of it is applied. (Deciding on the device instead, by
the optimiser's `found_inf`, would save no wait: the figures are needed each step.) The optimiser's step itself
is not waited for; `settle` does, at the end of what is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from coresident.engines.pool.learning.adamw8bit import AdamW8bit
from coresident.engines.pool.learning.checkpointing import checkpoint_layers
from coresident.engines.pool.learning.dpo import Preference, preference, reference_log_probabilities
from coresident.engines.pool.learning.scoring import Scorer, log_probabilities
from coresident.engines.pool.learning.sft import Imitation, imitation
from coresident.engines.pool.learning.tokenized import Batch
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.quantised.linear import share_room
from coresident.errors import InternalError

if TYPE_CHECKING:
    from torch import Tensor, nn

FIGURES = {"dpo": ("chosen_reward", "rejected_reward", "margin", "accuracy"), "sft": ()}
SERIES = ("loss", *FIGURES["dpo"], "gradient_norm", "tokens")
# Batches of at most so many bytes of token ids are all on the device before the first step.
AHEAD = 16 * 2**20


class NonFinite(FloatingPointError):  # noqa: N818 - it is an outcome
    """A loss, a gradient or an adapter is NaN or infinite: an outcome of the training, not a number."""


@dataclass(frozen=True)
class StepResult:
    """One optimiser step, counted from 1.

    Rewards, `margin` and `accuracy` are means over the batch's pairs before the step (None for SFT);
    `gradient_norm` is before clipping; `tokens` are real tokens of every sequence; `seconds` is the whole step,
    batch included, up to the optimiser's last launch.
    """

    step: int
    loss: float
    gradient_norm: float
    tokens: int
    seconds: float
    chosen_reward: float | None = None
    rejected_reward: float | None = None
    margin: float | None = None
    accuracy: float | None = None


class Learner:
    """Trains the adapter of `model` on `batches`, one step a call, with AdamW.

    The learning rate rises linearly over `warmup_steps` (step k of w has k/w of it, so the first step already
    learns) and stays constant. Gradients are clipped to the norm `clip`. Raises `NonFinite` before anything
    non-finite is applied.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Batch], settings: DPO) -> None:
        self.model = model
        self.series: dict[str, list[float]] = {
            name: [] for name in ("loss", *FIGURES[settings.loss], "gradient_norm", "tokens")
        }
        self._settings = settings
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self._parameters:
            raise InternalError("a learner was given a model that has nothing to train")
        # The reference is the bare base unless it is said to be another, so a policy that starts elsewhere would
        # be held to the wrong one.
        unsaid = settings.loss == "dpo" and settings.held_to is None
        if unsaid and any(value.any() for name, value in model.named_parameters() if ".lora_B." in name):
            raise InternalError("a learner was given an adapter that is not zero")
        self._room = share_room(model)
        self.scorer = Scorer.of(model)
        if settings.checkpointing:
            checkpoint_layers(model)
        self._device = self._parameters[0].device
        self._on_card = self._device.type == "cuda"
        self.optimizer = optimizer(self._parameters, settings)
        self._work = self._worked_out(batches)

    @property
    def steps(self) -> int:
        """How many steps are done."""
        return len(self.series["loss"])

    def step(self) -> StepResult:
        """Train on the next batch."""
        start = time.monotonic()
        step = self.steps + 1
        batch, reference = next(self._work, (None, None))
        if batch is None:
            raise InternalError(f"step {step} was asked of a learner whose batches ended after {step - 1}")
        outcome = self._outcome(batch, reference)
        with self._room.opened():
            outcome.loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        total = get_total_norm(gradients, foreach=self._on_card)
        told = self._fetched({"loss": outcome.loss, "gradient_norm": total, **outcome.figures}, step)
        clip_grads_with_norm_(self._parameters, self._settings.clip, total, foreach=self._on_card)
        self.optimizer.param_groups[0]["lr"] = self._settings.learning_rate * warmup(
            step, self._settings.warmup_steps
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        result = StepResult(step=step, tokens=batch.tokens, seconds=time.monotonic() - start, **told)
        for name, values in self.series.items():
            values.append(getattr(result, name))
        return result

    def reference(self, batch: Batch) -> Tensor:
        """Log-probabilities under what the policy is held to, shape [2B]. Before the first step: a policy held to
        where it starts is its own reference only there.
        """
        if self._settings.held_to != "start":
            return reference_log_probabilities(self.scorer, batch)
        if self.steps:
            raise InternalError("a reference that is where the training started was asked for after that")
        with torch.no_grad():
            return log_probabilities(self.scorer, batch)

    def settle(self) -> None:
        """Wait until the device has done everything that it was told."""
        if self._on_card:
            torch.cuda.synchronize(self._device)

    def _outcome(self, batch: Batch, reference: Tensor | None) -> Preference | Imitation:
        if self._settings.loss == "sft":
            return imitation(self.scorer, batch)
        return preference(self.scorer, batch, self._settings.beta, reference)

    def _fetched(self, figures: dict[str, Tensor], step: int) -> dict[str, float]:
        """All figures in one transfer. On anything that is not finite the gradients are dropped."""
        values = torch.stack([figure.detach().double() for figure in figures.values()]).tolist()
        told = dict(zip(figures, values, strict=True))
        for name, value in told.items():
            if not math.isfinite(value):
                self.optimizer.zero_grad(set_to_none=True)
                raise NonFinite(f"the {name.replace('_', ' ')} is {value} at step {step}")
        return told

    def _worked_out(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor | None]]:
        """Batches on the device, each with its reference log-probabilities where those are worked out before the
        first step.
        """
        settings = self._settings
        early = settings.reference == "precomputed" or settings.held_to == "start"
        beforehand = settings.loss == "dpo" and early
        size = 2 * settings.batch * settings.max_length * settings.steps * torch.int64.itemsize
        if not beforehand and size > AHEAD:
            return ((batch.to(self._device), None) for batch in batches)
        moved = [batch.to(self._device) for batch in batches]
        if not beforehand:
            return ((batch, None) for batch in moved)
        return iter([(batch, self.reference(batch)) for batch in moved])


def optimizer(parameters: Sequence[Tensor], settings: DPO) -> torch.optim.Optimizer:
    """AdamW over the parameters, its moments in float32 or in 8 bits."""
    if settings.optimizer == "adamw8bit":
        return AdamW8bit(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        foreach=False,
        fused=parameters[0].is_cuda,
    )


def warmup(step: int, steps: int) -> float:
    """The share of the learning rate at a step (from 1): step/steps up to `steps`, then 1.

    transformers' schedule is one step later: there the first step has a learning rate of zero and trains
    nothing.
    """
    return min(1.0, step / steps) if steps else 1.0
