"""Routing as transformers' own model does it: every router watched while the model generates.

A router's logits are computed here from what it is given, so that they are raw whatever a version of transformers returns. This
is the oracle of routing, and fast enough on a card, since prompts of one length go through together.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coresident.engines.moe.models.checkpoint import Checkpoint
from coresident.engines.moe.traces.manifest import Sampling
from coresident.engines.moe.traces.routed import Generate, Routed, drawn
from coresident.errors import MachineError, UserError


@dataclass(frozen=True)
class Ahead:
    """Which earlier states each router is also shown (`depths`, in layers), and how many of its experts are kept."""

    depths: tuple[int, ...]
    width: int


def load(path: Path, device: torch.device) -> nn.Module:
    """The model of a Hugging Face directory, in the dtype that it is stored in, from its files alone."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype="auto", local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"transformers cannot load {path}: {said[0]}", "give a Hugging Face directory that it loads"
        ) from error
    try:
        return model.eval().to(device)  # type: ignore[no-any-return]
    except (RuntimeError, AssertionError) as error:
        raise MachineError(
            f"the model does not go to {device}: {str(error).splitlines()[0]}", "choose another --device"
        ) from error


def generator(checkpoint: Checkpoint, device: torch.device, ahead: Ahead) -> Generate:
    """The model, loaded once, as what goes on from prompts; the tokens that end a text are never drawn."""
    model = load(checkpoint.path, device)
    return lambda prompts, seeds, sampling: generate(
        model, prompts, seeds, sampling, ahead, checkpoint.architecture.ends
    )


@dataclass
class _Watched:
    """One layer with experts, and what its router and the norm before it saw in the last pass."""

    router: Any
    norm: Any
    seen: Tensor | None = None
    state: Tensor | None = None
    chosen: Tensor | None = None

    def logits(self, state: Tensor) -> Tensor:
        """This router's raw logits [rows, N] on a state before the norm."""
        normed = self.norm.forward(state).flatten(0, -2)
        return F.linear(normed, self.router.weight)


@contextlib.contextmanager
def _watching(model: nn.Module) -> Iterator[list[_Watched]]:
    watched, handles = [], []
    for layer in model.model.layers:  # type: ignore[union-attr]
        router = getattr(layer.mlp, "gate", None)
        if router is None:
            continue
        one = _Watched(router, layer.post_attention_layernorm)
        watched.append(one)

        def routed(_: nn.Module, given: Any, returned: Any, one: _Watched = one) -> None:
            one.seen = given[0].flatten(0, -2)
            parts = returned if isinstance(returned, tuple) else (returned,)
            whole = [part for part in parts if not part.is_floating_point()]
            one.chosen = whole[0] if whole else None

        def normed(_: nn.Module, given: Any, one: _Watched = one) -> None:
            one.state = given[0]

        handles.append(router.register_forward_hook(routed))
        handles.append(one.norm.register_forward_pre_hook(normed))
    try:
        yield watched
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    sampling: Sampling,
    ahead: Ahead,
    never: Sequence[int] = (),
) -> list[Routed]:
    """Go on from `prompts`, all of one length, for `max_tokens` tokens each, the last of which is not fed back.

    Every prompt has a random source of its own (`seeds`), so that what it draws does not depend on who goes through with it.
    `never` are tokens that are not drawn, such as those that end a text: a trace is as long as it was asked to be.
    """
    from transformers import DynamicCache

    device = next(model.parameters()).device
    sources = [torch.Generator().manual_seed(seed) for seed in seeds]
    rows = torch.tensor(prompts, device=device)
    passed, parts = [rows.cpu()], []
    held = DynamicCache(config=model.config)
    # Renamed in transformers 5.2x.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with _watching(model) as watched:
        for step in range(sampling.max_tokens):
            told: Any = model(rows, use_cache=True, **{name: held})
            parts.append(_taken(watched, len(prompts), ahead))
            if step + 1 == sampling.max_tokens:
                break
            following = drawn(told.logits[:, -1].float().cpu(), sources, sampling.temperature, never)
            passed.append(following[:, None])
            rows = following[:, None].to(device)
    tokens = torch.cat(passed, dim=1).to(torch.int32).numpy()
    logits, experts, shown = (torch.cat(part, dim=1).numpy() for part in zip(*parts, strict=True))
    return [Routed(tokens[i], logits[i], experts[i], shown[i]) for i in range(len(prompts))]


def _taken(watched: Sequence[_Watched], batch: int, ahead: Ahead) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, T, L, N] logits, [batch, T, L, k] experts, [batch, T, depths, L, width] ranked by the routers ahead."""
    logits, experts, shown = [], [], []
    for index, one in enumerate(watched):
        assert one.seen is not None
        found = F.linear(one.seen, one.router.weight)
        chosen = one.chosen
        if chosen is None:
            chosen = found.float().topk(one.router.top_k).indices
        logits.append(found.float())
        experts.append(chosen)
        for depth in ahead.depths:
            state = watched[index - depth].state if index >= depth else None
            ranked = torch.zeros(len(found), ahead.width, dtype=torch.int64, device=found.device)
            shown.append(ranked if state is None else one.logits(state).topk(ahead.width).indices)
    if shown:
        later = torch.stack(shown, 1).view(len(shown[0]), len(watched), len(ahead.depths), ahead.width)
        later = later.transpose(1, 2)
    else:
        later = torch.zeros(len(logits[0]), 0, len(watched), ahead.width, dtype=torch.int64)
    joined = (torch.stack(logits, 1), torch.stack(experts, 1), later)
    by_prompt = [part.cpu().view(batch, -1, *part.shape[1:]) for part in joined]
    return by_prompt[0], by_prompt[1], by_prompt[2]
