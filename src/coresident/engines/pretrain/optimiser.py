"""AdamW that rejects a gradient which is not finite, without the host having to look at it.

The gradient's norm stays on the device. Clipping is handed to the fused optimiser as a scale, so that it costs no pass of its
own, and `found_inf` keeps it from moving anything, its step counts included. A rejected gradient rejects all that follow: the
weights stay as the last finite update left them, however late the host learns of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.utils import get_total_norm

from coresident.engines.pretrain.parameters import Optimiser

if TYPE_CHECKING:
    from torch import Tensor, nn


class ClippedAdamW:
    """Trains the parameters of `model`. `rejected` is a float32 scalar on the device: the number of the first update whose
    gradient or loss was not finite, or 0.
    """

    def __init__(self, model: nn.Module, settings: Optimiser, in_place: bool = False) -> None:
        """`in_place`: gradients keep their memory from update to update, and every microbatch adds to it. A captured
        backward pass needs that: what it returns lies in memory that its next replay overwrites.
        """
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self.parameters = [one for _, one in named]
        self.names = [name for name, _ in named]
        matrices = [one for one in self.parameters if one.ndim >= 2]
        others = [one for one in self.parameters if one.ndim < 2]
        device = self.parameters[0].device
        assert settings.learning_rate is not None and settings.beta2 is not None
        # A tensor, so that neither a captured nor a compiled step would keep the first rate.
        self._rate = torch.tensor(settings.learning_rate, dtype=torch.float32, device=device)
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=self._rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self._clip, self._in_place = settings.clip, in_place
        for one in self.parameters if in_place else ():
            one.grad = torch.zeros_like(one)
        self.rejected = torch.zeros((), dtype=torch.float32, device=device)

    def step(self, update: int, rate: float, loss: Tensor) -> Tensor:
        """Apply the gradients of `loss` with this learning rate; they are dropped. Returns their norm before clipping, on the
        device.
        """
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        norm = get_total_norm(gradients, foreach=True)
        bad = ~(torch.isfinite(norm) & torch.isfinite(loss)) | (self.rejected > 0)
        self.rejected.copy_(torch.where((self.rejected == 0) & bad, float(update), self.rejected))
        self._rate.fill_(rate)
        # What the fused kernel divides gradients by: at least 1, so that a small gradient is not made larger.
        self.adamw.grad_scale = (norm / self._clip).clamp(min=1.0)  # type: ignore[attr-defined]
        self.adamw.found_inf = bad.float()  # type: ignore[attr-defined]
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=not self._in_place)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by `PART.PARAMETER`; empty before the first step."""
        return {
            f"{part}.{name}": value
            for name, one in zip(self.names, self.parameters, strict=True)
            for part, value in self.adamw.state.get(one, {}).items()
        }

    def expected(self) -> dict[str, Tensor]:
        """Names and shapes of `state` after a step."""
        return {
            f"{part}.{name}": self.rejected if part == "step" else one
            for name, one in zip(self.names, self.parameters, strict=True)
            for part in ("step", "exp_avg", "exp_avg_sq")
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave, on whatever device that was."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            part, _, name = key.partition(".")
            by_name.setdefault(name, {})[part] = value
        for name, one in zip(self.names, self.parameters, strict=True):
            self.adamw.state[one] = {
                part: value.to(one.device, copy=True) for part, value in by_name.get(name, {}).items()
            }
