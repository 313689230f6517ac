"""The decoder of Llama's kind (Llama, Mistral, Qwen2) for packed rows, with its backward pass written out.

Autograd would compute the same. Written out, each large matrix is read and written as often as it must be: gradients by
the same input are accumulated by the products themselves, the adapters of projections that read one input are one
product, and everything between products is `pointwise`. transformers' own modules hold the weights and are what this is
held to; whether a base is of this kind is not believed but tried (`agrees`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from coresident.engines.pool.learning import frozen
from coresident.engines.pool.learning.tokenized import Example, collate
from coresident.engines.pool.packed.attention import attend
from coresident.engines.pool.packed.groups import add_times, between, times
from coresident.engines.pool.packed.layers import Layer, Projection, layers_of
from coresident.engines.pool.packed.pointwise import Pointwise
from coresident.engines.pool.packed.policy import Current, Policy
from coresident.engines.pool.packed.rows import Rows, pack

if TYPE_CHECKING:
    from torch import Tensor


class Decoder:
    """The policy's decoder. With `checkpointing` layers keep what they took in, and make the rest again."""

    def __init__(self, policy: Policy, pointwise: Pointwise, checkpointing: bool = False) -> None:
        found = layers_of(policy)
        assert not isinstance(found, str)
        self.layers = found
        self.policy, self.pointwise, self.checkpointing = policy, pointwise, checkpointing
        model: Any = policy.scorer.decoder
        self.embedding, self.rotary = model.embed_tokens, model.rotary_emb
        self.last = (model.norm.weight, float(model.norm.variance_epsilon))

    @torch.no_grad()
    def forward(self, rows: Rows, keep: bool) -> tuple[Tensor, list[Any]]:
        """Hidden states [T, d], and what `backward` takes (nothing unless `keep`)."""
        angles = self._angles(rows)
        x = self.embedding(rows.ids)
        more: Tensor | None = None
        kept: list[Any] = []
        for layer in self.layers:
            taken = [x, more]
            x, more, saved = self._layer(layer, rows, x, more, angles, keep and not self.checkpointing)
            if keep:
                kept.append(taken if self.checkpointing else saved)
        assert more is not None
        x, hidden = self.pointwise.add_normed(x, more, *self.last)
        if keep:
            kept.append((x, angles))
        return hidden, kept

    @torch.no_grad()
    def backward(self, rows: Rows, kept: list[Any], gradient: Tensor) -> None:
        """Write the adapters' gradients, given that of the hidden states. Takes `kept` apart as it goes."""
        x, angles = kept.pop()
        weight, epsilon = self.last
        towards = self.pointwise.norm_back(x, weight, epsilon, gradient, torch.zeros_like(x))
        del x
        for number in reversed(range(len(self.layers))):
            saved = kept.pop()
            if self.checkpointing:
                x, more = (saved[0], saved[1])
                saved = self._layer(self.layers[number], rows, x, more, angles, True)[2]
            towards = self._layer_back(self.layers[number], saved, angles, towards, number > 0)

    def _angles(self, rows: Rows) -> tuple[Tensor, Tensor]:
        weight = self.last[0]
        cosine, sine = self.rotary(weight[None], rows.positions[None])
        return cosine[0], sine[0]

    def _layer(
        self, layer: Layer, rows: Rows, x: Tensor, more: Tensor | None, angles: Any, keep: bool
    ) -> tuple[Tensor, Tensor, list[Any]]:
        """One layer over x + more: what it leaves is again a sum of two, which the next layer's norm takes."""
        do = self.pointwise
        if more is None:
            h = do.normed(x, *layer.before)
        else:
            x, h = do.add_normed(x, more, *layer.before)
        (query, key, value), narrow_qkv = self._forth(layer.qkv, h)
        heads, key_heads, width = layer.heads
        query, key = do.rotated(query.view(-1, heads, width), key.view(-1, key_heads, width), *angles)
        value = value.view(-1, key_heads, width)
        states = [state.detach().requires_grad_(keep) for state in (query, key, value)]
        with torch.set_grad_enabled(keep):
            mixed = attend(rows, states[0], states[1], states[2], layer.scale)
        flat = mixed.detach().reshape(len(x), -1)
        (attended,), narrow_out = self._forth(layer.out, flat)
        middle, h2 = do.add_normed(x, attended, *layer.between)
        del attended
        (gate, up), narrow_gate_up = self._forth(layer.gate_up, h2)
        activation = do.gated(gate, up)
        (more,), narrow_down = self._forth(layer.down, activation)
        if not keep:
            return middle, more, []
        saved = [
            x, h, narrow_qkv, states, mixed, flat, narrow_out, middle, h2, narrow_gate_up, gate, up, activation, narrow_down,
        ]  # fmt: skip
        return middle, more, saved

    def _layer_back(
        self, layer: Layer, saved: list[Any], angles: Any, towards: Tensor, wanted: bool
    ) -> Tensor:
        """The gradient of a layer's input, given that of its output; of the first layer nobody wants one."""
        do = self.pointwise
        (
            x, h, narrow_qkv, states, mixed, flat, narrow_out, middle, h2, narrow_gate_up, gate, up, activation, narrow_down,
        ) = saved  # fmt: skip
        saved.clear()
        inner = self._back(layer.down, activation, narrow_down, [towards])
        gate, up = do.gated_back(gate, up, inner)
        del inner, activation
        inner = self._back(layer.gate_up, h2, narrow_gate_up, [gate, up])
        del gate, up, h2
        towards = do.norm_back(middle, *layer.between, inner, towards)
        del middle
        inner = self._back(layer.out, flat, narrow_out, [towards])
        query, key, value = torch.autograd.grad(mixed, states, inner.view(mixed.shape))
        del mixed, flat, states
        cosine, sine = angles
        query, key = do.rotated(query, key, cosine, -sine)
        inner = self._back(
            layer.qkv, h, narrow_qkv, [state.reshape(len(x), -1) for state in (query, key, value)], wanted
        )
        return do.norm_back(x, *layer.before, inner, towards) if wanted else towards

    def _forth(self, projections: Sequence[Projection], x: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Each projection of x with its adapter, and s (x A') of all of them side by side."""
        found = [frozen.product(one.base, x) for one in projections]
        current = self.policy.current
        adapted = [place for place, one in enumerate(projections) if one.number >= 0]
        if current is None or not adapted:
            return found, None
        arena, groups = current.arena, current.groups
        numbers = [projections[place].number for place in adapted]
        narrow = times(groups, x.to(arena.work.dtype), arena.joined(numbers)[0].transpose(1, 2))
        if current.scale is not None:
            narrow *= current.scale
        for part, place in zip(torch.split(narrow, arena.rank, dim=1), adapted, strict=True):
            up = arena.slots[projections[place].number].up.detach()
            add_times(groups, found[place], part, up.transpose(1, 2))
        return found, narrow

    def _back(
        self,
        projections: Sequence[Projection],
        x: Tensor,
        narrow: Tensor | None,
        gradients: Sequence[Tensor],
        wanted: bool = True,
    ) -> Tensor:
        """The gradient of x (if wanted), given those of its projections; the adapters' are written."""
        back: Tensor | None = None
        if wanted:
            for one, gradient in zip(projections, gradients, strict=True):
                back = (
                    frozen.transposed(one.base, gradient) if back is None else _more(one.base, gradient, back)
                )
        if narrow is None:
            return x if back is None else back
        current = self.policy.current
        assert current is not None
        self._adapters_back(current, projections, x, narrow, gradients, back)
        return x if back is None else back

    def _adapters_back(
        self,
        current: Current,
        projections: Sequence[Projection],
        x: Tensor,
        narrow: Tensor,
        gradients: Sequence[Tensor],
        back: Tensor | None,
    ) -> None:
        arena, groups = current.arena, current.groups
        adapted = [place for place, one in enumerate(projections) if one.number >= 0]
        inner = torch.empty_like(narrow)
        parts = zip(
            torch.split(narrow, arena.rank, dim=1),
            torch.split(inner, arena.rank, dim=1),
            adapted,
            strict=True,
        )
        for part, into, place in parts:
            slot = arena.slots[projections[place].number]
            gradient = gradients[place].to(narrow.dtype)
            between(groups, gradient, part, slot.for_up)
            times(groups, gradient, slot.up.detach(), into)
        if current.scale is not None:
            inner *= current.scale
        down, for_down = arena.joined([projections[place].number for place in adapted])
        between(groups, inner, x.to(narrow.dtype), for_down)
        if back is not None:
            add_times(groups, back, inner, down)


def _more(base: nn.Module, gradient: Tensor, back: Tensor) -> Tensor:
    if type(base) is nn.Linear:
        return back.addmm_(gradient, base.weight)
    return back.add_(frozen.transposed(base, gradient))


@torch.no_grad()
def agrees(policy: Policy) -> bool:
    """Whether the decoder that is written out says what the model's own does, of a few tokens."""
    examples = [Example((1, 2, 3), (4, 5)), Example((3,), (2, 1)), Example((5, 1, 4, 2), (3, 6, 0))]
    rows = pack([collate(examples, 8, 0)]).to(policy.device)
    before, policy.current, policy.attention.rows = policy.current, None, rows
    theirs = policy.decoded(rows)
    ours, _ = Decoder(policy, Pointwise()).forward(rows, keep=False)
    policy.current = before
    apart = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    return bool(apart < (5e-2 if ours.dtype in (torch.bfloat16, torch.float16) else 1e-4))
