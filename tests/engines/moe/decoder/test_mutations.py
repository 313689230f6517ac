"""Errors of the kinds that others made, made here on purpose: each must fail the comparison that the exactness tests make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coresident.engines.moe import assemble
from coresident.engines.moe.assemble import Engine
from coresident.engines.moe.decoder import blocks
from coresident.engines.moe.layout.record import RecordFormat, Weights
from coresident.engines.moe.parameters import Decode
from coresident.engines.moe.residency import experts
from coresident.engines.moe.residency.slots import Slots
from coresident.errors import InternalError, UserError

Build = Callable[..., Engine]
Theirs = Callable[[str, list[int]], Tensor]
TOKENS = list(range(20, 60))


def differs(engine: Engine, reference: Tensor) -> bool:
    """Prefill half of the tokens, decode the others, and compare every score."""
    found = [engine.decoder.prefill([TOKENS[:20]])]
    found += [engine.decoder.step(torch.tensor([token])) for token in TOKENS[20:]]
    return float((torch.cat(found) - reference[19:]).abs().max()) > 1e-4


@pytest.fixture(params=["olmoe", "qwen3"])
def name(request: pytest.FixtureRequest) -> str:
    """Each kind of model."""
    found: str = request.param
    return found


def test_unchanged_it_passes(name: str, build: Build, theirs: Theirs) -> None:
    assert not differs(build(name, slots=3), theirs(name, TOKENS))


def test_a_slot_reused_in_flight(
    name: str, build: Build, theirs: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second fill of a step goes into the slot of the first, which the step still needs."""
    place = Slots._place

    def reused(self: Slots, layer: int, expert: int, victim: int | None) -> int:
        slot = place(self, layer, expert, victim)
        last = self.__dict__.setdefault("last", {})
        last[layer], slot = slot, last.get(layer, slot)
        self.slot[layer][expert] = slot
        return slot

    monkeypatch.setattr(Slots, "_place", reused)
    assert differs(build(name, slots=3), theirs(name, TOKENS))


def test_up_and_down_swapped_in_the_record(
    name: str, build: Build, theirs: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes allow it: up and down have as many weights."""
    encode = RecordFormat.encode

    def swapped(
        self: RecordFormat, gate: Tensor, up: Tensor, down: Tensor, into: Tensor | None = None
    ) -> Tensor:
        return encode(self, gate, down.reshape(up.shape), up.reshape(down.shape), into)

    monkeypatch.setattr(RecordFormat, "encode", swapped)
    assert differs(build(name, slots=3), theirs(name, TOKENS))


def test_gate_and_up_swapped_in_the_product(
    name: str, build: Build, theirs: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    swiglu = experts.swiglu

    def swapped(x: Tensor, weights: Weights) -> Tensor:
        return swiglu(x, Weights(torch.cat(weights.gate_up.chunk(2)[::-1]), weights.down))

    monkeypatch.setattr(experts, "swiglu", swapped)
    assert differs(build(name, slots=3), theirs(name, TOKENS))


def test_one_expert_skipped(name: str, build: Build, theirs: Theirs, monkeypatch: pytest.MonkeyPatch) -> None:
    swiglu, layer_expert = experts.swiglu, Slots.expert

    def marked(self: Slots, layer: int, expert: int, dtype: torch.dtype) -> Weights:
        found = layer_expert(self, layer, expert, dtype)
        return Weights(found.gate_up * 0, found.down) if (layer, expert) == (1, 5) else found

    monkeypatch.setattr(Slots, "expert", marked)
    assert experts.swiglu is swiglu
    assert differs(build(name, slots=3), theirs(name, TOKENS))


def test_router_weights_normalised_when_they_must_not_be_and_the_other_way_round(
    name: str, build: Build, theirs: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = blocks.route

    def otherwise(found: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        chosen, weights = route(found, logits)
        if found.normalise:
            return chosen, logits.softmax(-1).gather(-1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True)

    monkeypatch.setattr(blocks, "route", otherwise)
    assert differs(build(name, slots=3), theirs(name, TOKENS))


def test_probabilities_taken_for_logits(
    name: str, build: Build, theirs: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = blocks.router_logits
    monkeypatch.setattr(blocks, "router_logits", lambda layer, x: scores(layer, x).softmax(-1))
    assert differs(build(name, slots=3), theirs(name, TOKENS))


def test_a_stale_record_in_a_slot(
    name: str, build: Build, theirs: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy in ten does not happen."""
    install = Slots._install

    def sometimes(self: Slots, slot: int, record: Tensor) -> Any:
        if self.installs % 10 == 9:
            self.installs += 1
            return None
        return install(self, slot, record)

    monkeypatch.setattr(Slots, "_install", sometimes)
    assert differs(build(name, slots=3), theirs(name, TOKENS))


def test_an_expert_without_a_slot_is_never_computed_with(build: Build) -> None:
    engine = build("olmoe", slots=2)
    engine.decoder.prefill([TOKENS])
    absent = next(e for e in range(8) if e not in engine.cache.resident[0])
    with pytest.raises(InternalError, match=f"expert {absent} is not resident"):
        engine.slots.expert(0, absent, torch.float32)


def transposed(source: Path, out: Path, *names: str) -> Path:
    """The stacked model with these expert tensors transposed."""
    out.mkdir()
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    for key, tensor in tensors.items():
        if key.endswith(names):
            tensors[key] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_a_transpose_that_shapes_hide(tmp_path: Path) -> None:
    """2 I = H, as OLMoE has it: gate_up transposed has its own shape again, and down tells."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        eos_token_id=None,
        pad_token_id=None,
    )
    OlmoeForCausalLM(config).save_pretrained(tmp_path / "model", save_original_format=False)
    wrong = transposed(tmp_path / "model", tmp_path / "wrong", "gate_up_proj", "down_proj")
    with pytest.raises(UserError, match=r"down_proj is \[4, 16, 32\], the transpose of \[4, 32, 16\]"):
        assemble.open_model(Decode.model_validate({"model": {"path": str(wrong)}}).model)
