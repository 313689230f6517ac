"""How likely a model thinks a batch's scored tokens are, by the shortest way that the model allows.

Most causal language models are a decoder and a linear output layer: then only hidden states of scored positions
meet the output layer, in chunks (`logprobs`). Some scale or cap their logits on the way (Gemma, Cohere, Granite),
some train the output layer: those go through their own forward pass. Which one a model is, is not believed but
tried: its own forward pass, given hidden states of our choice, must say what our two parts say.

No attention mask is given. Rows are padded on the right, no position sees a later one, and padded positions are
never scored: the mask would change no result, and without it attention is the plain causal one, which is the
fast one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from coresident.engines.pool.learning.logprobs import fused, log_softmax
from coresident.engines.pool.learning.tokenized import Batch

if TYPE_CHECKING:
    from torch import Tensor

# What transformers' configurations call a change of the logits, and the values that change nothing.
_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
_NOTHING = (None, 1, 1.0)
# The probe's largest logit: well beyond any cap in use.
_LOUD = 100.0


@dataclass(frozen=True)
class Scorer:
    """A PEFT model with one adapter, prepared to score batches. `whole` says why its own forward pass is taken
    (empty: it is not, and no logits of all positions are ever there).
    """

    model: nn.Module
    decoder: nn.Module | None
    weight: Tensor | None
    bias: Tensor | None
    whole: str
    adapters: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Scorer:
        """Look at the model once, before training."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapters = tuple(module for module in model.modules() if isinstance(module, BaseTunerLayer))
        base: Any = model.get_base_model()  # type: ignore[operator]
        reason = _not_two_parts(base)
        if reason:
            return cls(model, None, None, None, reason, adapters)
        head = base.get_output_embeddings()
        return cls(model, base.get_decoder(), head.weight, head.bias, "", adapters)

    def score(self, batch: Batch) -> Tensor:
        """The log-probability of every scored token given all before it, shape [R], in the order of
        `batch.labels`; float32 (float64 for a float64 model).
        """
        if self.decoder is None or self.weight is None:
            return _by_own_forward(self.model, batch)
        hidden = self.decoder(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        return fused(hidden.flatten(0, 1), batch.places, self.weight, self.bias, batch.labels)

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """The base alone.

        PEFT's own context also walks over every parameter and, on leaving, marks the whole adapter trainable,
        whatever was frozen on purpose; a step cannot afford the one and must not do the other.
        """
        before = [layer._disable_adapters for layer in self.adapters]
        try:
            for layer in self.adapters:
                layer._disable_adapters = True
            yield
        finally:
            for layer, disabled in zip(self.adapters, before, strict=True):
                layer._disable_adapters = disabled


def log_probabilities(scorer: Scorer, batch: Batch) -> Tensor:
    """The summed log-probability of each row's scored tokens, shape [rows]."""
    scored = scorer.score(batch)
    rows, width = batch.input_ids.shape
    spread = scored.new_zeros(rows * width).index_copy(0, batch.places, scored)
    return spread.view(rows, width).sum(dim=1)


def _by_own_forward(model: nn.Module, batch: Batch) -> Tensor:
    """The plain version: the model's own logits, from the first position that is scored in any row on."""
    width = batch.input_ids.shape[1]
    first = int(batch.completion_mask[:, 1:].any(dim=0).int().argmax())
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    base: Any = model.get_base_model()  # type: ignore[operator]
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        positions = torch.arange(first, width, device=batch.input_ids.device)
        logits = model(**inputs, logits_to_keep=positions).logits
    else:
        logits = model(**inputs).logits[:, first:]
    rows = logits[batch.places // width, batch.places % width - first]
    return log_softmax(rows).gather(1, batch.labels[:, None])[:, 0]


def _not_two_parts(base: Any) -> str:
    """Why the model is not just its decoder and a frozen linear layer, or nothing."""
    config = base.config.get_text_config()
    for name in _CHANGES:
        if getattr(config, name, None) not in _NOTHING:
            return f"its logits are changed by {name} {getattr(config, name)}"
    head, decoder = base.get_output_embeddings(), base.get_decoder()
    if type(head) is not nn.Linear:
        return f"its output layer is a {type(head).__name__}"
    if any(parameter.requires_grad for parameter in head.parameters()):
        return "its output layer is trained"
    if decoder is None or decoder is base:
        return "it names no decoder"
    return (
        "" if _probed(base, decoder, head) else "its forward pass is more than a decoder and a linear layer"
    )


@torch.no_grad()
def _probed(base: Any, decoder: Any, head: nn.Linear) -> bool:
    """Whether the model's forward pass hands our token ids to the decoder and turns hidden states into logits by
    the output layer alone.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPast

    ids = torch.zeros((1, 2), dtype=torch.int64, device=head.weight.device)
    drawn = torch.randn((1, 2, head.in_features), generator=torch.Generator().manual_seed(0))
    hidden = drawn.to(head.weight)
    hidden = hidden * (_LOUD / head(hidden).abs().max().clamp(min=1e-6)).to(hidden)
    expected = head(hidden)
    given: list[Any] = []

    def instead(*positional: Any, **named: Any) -> Any:
        given.append(named.get("input_ids", positional[0] if positional else None))
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    decoder.forward = instead
    try:
        logits = base(input_ids=ids, use_cache=False).logits
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    finally:
        del decoder.forward
    close = 2e-2 if head.weight.dtype in (torch.bfloat16, torch.float16) else 1e-4
    return (
        len(given) == 1
        and given[0] is ids
        and logits.shape == expected.shape
        and torch.allclose(logits.double(), expected.double(), rtol=close, atol=close * _LOUD)
    )
