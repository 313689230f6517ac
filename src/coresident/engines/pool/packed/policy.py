"""The frozen base with a pack's adapters in it: the learner's own model, in which each adapted layer multiplies the base
once for the rows of all learners and each learner's rows by its own A and B.

The model is the one that a learner alone has (`learning.model`), so that tokens, base, rotary angles, norms and output
layer are the same; only what an adapted layer and attention do with rows is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from coresident.engines.pool.learning import frozen
from coresident.engines.pool.learning.logprobs import fused
from coresident.engines.pool.learning.scoring import Scorer
from coresident.engines.pool.packed.arena import Arena, Layer
from coresident.engines.pool.packed.attention import Attention
from coresident.engines.pool.packed.groups import Groups, add_times, between, times
from coresident.engines.pool.packed.rows import Rows
from coresident.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

# transformers knows an attention by its name, and each policy has its own.
_NAMES = (f"coresident_packed_{number}" for number in count())


@dataclass
class Current:
    """What the adapted layers multiply with now. `scale` [T, 1] is alpha / r of each row's learner; None where all are
    1.
    """

    arena: Arena
    groups: Groups
    scale: Tensor | None


class Policy:
    """A PEFT model whose base is attached, for packed rows; `current` is None for the bare base.

    Raises UserError for a base that it cannot serve.
    """

    def __init__(self, model: nn.Module) -> None:
        from peft.tuners.lora import Linear
        from transformers import AttentionInterface

        self.model = model
        self.scorer = Scorer.of(model)
        if self.scorer.whole:
            raise UserError(
                f"sharing: packed scores by the output layer alone, and of this base {self.scorer.whole}",
                "use another sharing for this base",
            )
        self.attention = Attention()
        name = next(_NAMES)
        AttentionInterface.register(name, self.attention)
        base: Any = model.get_base_model()  # type: ignore[operator]
        base.set_attn_implementation(name)
        self.base = base
        self.layers: list[Layer] = []
        self.current: Current | None = None
        for path, module in base.named_modules():
            if not isinstance(module, Linear):
                continue
            inner: Any = module.base_layer
            if not frozen.supported(inner):
                raise UserError(
                    f"sharing: packed cannot adapt {path}, a {type(inner).__name__}", "take it out of targets"
                )
            module.forward = self._forward(len(self.layers), inner)
            self.layers.append(Layer(path, inner.in_features, inner.out_features))
            for adapter in (module.lora_A, module.lora_B):
                # The pack's own take its place.
                adapter["default"].weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def check(self, longest: int) -> None:
        """Raise UserError for a base that is another function in a pack whose longest sequence has so many tokens: one that
        attends within a window, or whose rotary angles follow the longest sequence that is there.
        """
        # Where attentions do not say it themselves (Mistral), the configuration does, of all of them.
        saying = [module for module in self.base.modules() if hasattr(module, "sliding_window")]
        told_of = saying or [self.base.config.get_text_config()]
        windows = [
            window
            for one in told_of
            if isinstance(window := getattr(one, "sliding_window", None), int) and window < longest
        ]
        if windows:
            raise UserError(
                f"sharing: packed has plain causal attention, and this base attends within {min(windows)} of {longest} tokens",
                f"set max_length to {min(windows)} or less, or use another sharing for this base",
            )
        for module in self.base.modules():
            kind = getattr(module, "rope_type", None)
            if not isinstance(kind, str) or kind not in ("dynamic", "longrope"):
                continue
            told = getattr(module.config, "rope_parameters", None) or {}
            limit = told.get("original_max_position_embeddings") or module.config.max_position_embeddings
            if longest > limit:
                raise UserError(
                    f"sharing: packed: this base's rotary angles ({kind}) change for all rows where one sequence is longer"
                    f" than {limit} tokens, and max_length is {longest}",
                    f"set max_length to {limit} or less, or use another sharing for this base",
                )

    @property
    def device(self) -> torch.device:
        """Where the base is."""
        return next(self.model.parameters()).device

    def score(self, rows: Rows) -> Tensor:
        """The log-probability of every scored token, [R], in the order of `rows.labels`."""
        self.attention.rows = rows
        hidden = self.decoded(rows)
        weight, bias = self.scorer.weight, self.scorer.bias
        assert weight is not None
        return fused(hidden, rows.places, weight, bias, rows.labels)

    def decoded(self, rows: Rows) -> Tensor:
        """Hidden states [T, d], by the model's own decoder."""
        assert self.scorer.decoder is not None
        told = self.scorer.decoder(
            input_ids=rows.ids[None], position_ids=rows.positions[None], use_cache=False
        )
        hidden: Tensor = told.last_hidden_state[0]
        return hidden

    def _forward(self, number: int, base: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            current = self.current
            if current is None:
                return base(x)  # type: ignore[no-any-return]
            slot = current.arena.slots[number]
            return _Adapted.apply(x, slot.down, slot.up, base, number, current)  # type: ignore[no-any-return, no-untyped-call]

        return forward


class _Adapted(torch.autograd.Function):
    """x W' + b + s (x A') B' with each row's own A and B, as `learning.lora` has it for one learner."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, base: nn.Module, number: int, current: Current
    ) -> Tensor:
        y = frozen.product(base, x)
        narrow = times(current.groups, x.flatten(0, -2).to(down.dtype), down.transpose(1, 2))
        if current.scale is not None:
            narrow *= current.scale
        add_times(current.groups, y.view(-1, y.shape[-1]), narrow, up.transpose(1, 2))
        ctx.save_for_backward(x, narrow)
        ctx.base, ctx.slot, ctx.groups, ctx.scale = (
            base,
            current.arena.slots[number],
            current.groups,
            current.scale,
        )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow = ctx.saved_tensors
        slot, groups = ctx.slot, ctx.groups
        flat = gradient.flatten(0, -2)
        wide = flat.to(narrow.dtype)
        between(groups, wide, narrow, slot.for_up)
        inner = times(groups, wide, slot.up.detach())
        del wide
        if ctx.scale is not None:
            inner *= ctx.scale
        between(groups, inner, x.flatten(0, -2).to(narrow.dtype), slot.for_down)
        for_x = None
        if ctx.needs_input_grad[0]:
            for_x = frozen.transposed(ctx.base, flat)
            add_times(groups, for_x, inner, slot.down.detach())
            for_x = for_x.view(x.shape)
        return for_x, None, None, None, None, None
