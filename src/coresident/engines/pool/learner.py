"""One learner: the training step that every arm runs, whatever its base is shared with.

Everything that could differ from run to run is fixed here: the order of samples comes with the batches, the
optimiser's loops are the plain ones, and there is no dropout. On one thread of one machine the series are
equal bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from coresident.engines.pool.dpo import preference
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.tokenized import Batch
from coresident.errors import InternalError

if TYPE_CHECKING:
    from torch import nn

SERIES = ("loss", "chosen_reward", "rejected_reward", "margin", "accuracy", "gradient_norm", "tokens")


class NonFinite(FloatingPointError):  # noqa: N818 - it is an outcome
    """A loss, a gradient or an adapter is NaN or infinite: an outcome of the training, not a number."""


@dataclass(frozen=True)
class StepResult:
    """One optimiser step, counted from 1.

    Rewards, `margin` and `accuracy` are means over the batch's pairs before the step; `gradient_norm` is
    before clipping; `tokens` are real tokens of both sequences of every pair; `seconds` is the whole step,
    batch included.
    """

    step: int
    loss: float
    chosen_reward: float
    rejected_reward: float
    margin: float
    accuracy: float
    gradient_norm: float
    tokens: int
    seconds: float


class Learner:
    """Trains the adapter of `model` on `batches`, one step a call, with AdamW.

    The learning rate rises linearly over `warmup_steps` (step k of w has k/w of it, so the first step already
    learns) and stays constant. Gradients are clipped to the norm `clip`. Raises `NonFinite` before anything
    non-finite is applied.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Batch], settings: DPO) -> None:
        self.model = model
        self.series: dict[str, list[float]] = {name: [] for name in SERIES}
        self._batches = iter(batches)
        self._settings = settings
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self._parameters:
            raise InternalError("a learner was given a model that has nothing to train")
        # The reference is the bare base, so a policy that starts elsewhere would be held to the wrong one.
        if any(value.any() for name, value in model.named_parameters() if ".lora_B." in name):
            raise InternalError("a learner was given an adapter that is not zero")
        self._device = self._parameters[0].device
        self._foreach = self._device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            foreach=self._foreach,
            fused=False,
        )

    @property
    def steps(self) -> int:
        """How many steps are done."""
        return len(self.series["loss"])

    def step(self) -> StepResult:
        """Train on the next batch."""
        start = time.monotonic()
        step = self.steps + 1
        batch = next(self._batches, None)
        if batch is None:
            raise InternalError(f"step {step} was asked of a learner whose batches ended after {step - 1}")
        batch = batch.to(self._device)
        outcome = preference(self.model, batch, self._settings.beta)
        loss = outcome.loss.item()
        _require_finite(loss, "loss", step)
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        norm = self._clip(step)
        self._optimizer.param_groups[0]["lr"] = self._settings.learning_rate * warmup(
            step, self._settings.warmup_steps
        )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        result = StepResult(
            step=step,
            loss=loss,
            chosen_reward=outcome.chosen_rewards.mean().item(),
            rejected_reward=outcome.rejected_rewards.mean().item(),
            margin=outcome.margins.mean().item(),
            accuracy=outcome.accuracy,
            gradient_norm=norm,
            tokens=batch.tokens,
            seconds=time.monotonic() - start,
        )
        for name, values in self.series.items():
            values.append(getattr(result, name))
        return result

    def _clip(self, step: int) -> float:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        total = get_total_norm(gradients, foreach=self._foreach)
        norm = total.item()
        _require_finite(norm, "gradient norm", step)
        clip_grads_with_norm_(self._parameters, self._settings.clip, total, foreach=self._foreach)
        return norm


def warmup(step: int, steps: int) -> float:
    """The share of the learning rate at a step (from 1): step/steps up to `steps`, then 1.

    transformers' schedule is one step later: there the first step has a learning rate of zero and trains
    nothing.
    """
    return min(1.0, step / steps) if steps else 1.0


def _require_finite(value: float, what: str, step: int) -> None:
    if not math.isfinite(value):
        raise NonFinite(f"the {what} is {value} at step {step}")
