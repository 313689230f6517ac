"""Whatever is resident, wherever the rest lies and however it is read: what the whole model says, bit for bit."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from coresident.engines.moe import assemble
from coresident.engines.moe.assemble import Engine
from coresident.engines.moe.decoder.oracle import oracle
from coresident.engines.moe.generate import generate
from coresident.engines.moe.parameters import Decode

Build = Callable[..., Engine]
Prompt = Callable[..., list[int]]
MODELS = ["olmoe", "stacked", "qwen3", "ours"]
STEPS = 130


def decoded(engine: Engine, prompt: list[int], steps: int) -> tuple[list[int], Tensor]:
    """Tokens and scores [steps + 1, V] of greedy decoding."""
    scores = [engine.decoder.prefill([prompt])[0]]
    tokens = [int(scores[-1].argmax())]
    for _ in range(steps):
        scores.append(engine.decoder.step(torch.tensor(tokens[-1:]))[0])
        tokens.append(int(scores[-1].argmax()))
    return tokens, torch.stack(scores)


class Routes:
    """What a decoder's routers chose, as sets, a step and layer each."""

    def __init__(self, engine: Engine) -> None:
        self.seen: list[tuple[int, frozenset[int]]] = []
        engine.decoder.watch = self._watch

    def _watch(self, layer: int, logits: Tensor, chosen: Tensor) -> None:
        self.seen += [(layer, frozenset(row)) for row in chosen.tolist()]


@pytest.mark.parametrize("name", MODELS)
def test_decoding_is_transformers_over_many_tokens_and_routes(
    name: str, build: Build, prompt: Prompt, theirs: Callable[[str, list[int]], Tensor]
) -> None:
    engine = build(name, slots=3)
    routes = Routes(engine)
    tokens, scores = decoded(engine, prompt(12), STEPS)
    reference = theirs(name, prompt(12) + tokens[:-1])[11:]
    torch.testing.assert_close(scores, reference, rtol=0, atol=1e-4)
    assert tokens == reference.argmax(-1).tolist()
    assert len(tokens) >= 128
    assert len({(layer, chosen) for layer, chosen in routes.seen}) >= 50
    assert sum(one.misses for one in engine.cache.decoded) > 100


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_in_shards_of_any_order(
    kind: torch.dtype, saved: Callable[[str], Path], tmp_path: Path, prompt: Prompt
) -> None:
    """An expert's three matrices lie in three files, and a later layer's before an earlier one's."""
    shutil.copytree(saved("olmoe"), tmp_path / "model", ignore=lambda *_: ["model.safetensors"])
    tensors = load_file(saved("olmoe") / "model.safetensors")
    placed = {name: f"shard-{n % 3}.safetensors" for n, name in enumerate(sorted(tensors, reverse=True))}
    for shard in set(placed.values()):
        part = {name: tensors[name].to(kind) for name in tensors if placed[name] == shard}
        save_file(part, tmp_path / "model" / shard, metadata={"format": "pt"})
    (tmp_path / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed})
    )
    asked = Decode.model_validate({"model": {"path": str(tmp_path / "model")}, "slots": 3})
    engine = assemble.build(asked, assemble.open_model(asked.model), torch.device("cpu"), 100, 1)
    try:
        assert engine.form.encoding == {torch.float16: "F16", torch.bfloat16: "BF16"}[kind]
        tokens, scores = decoded(engine, prompt(12), 40)
    finally:
        engine.close()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.inference_mode():
        reference = theirs(torch.tensor([prompt(12) + tokens[:-1]])).logits[0, 11:]
    torch.testing.assert_close(scores, reference, rtol=0, atol=1e-4)
    assert tokens == reference.argmax(-1).tolist()


@pytest.mark.parametrize("name", ["olmoe", "qwen3", "ours"])
def test_every_capacity_gives_the_bits_of_the_resident_run(name: str, build: Build, prompt: Prompt) -> None:
    whole = build(name)
    tokens, scores = decoded(whole, prompt(20), 40)
    assert whole.slots.installs == 8 * 3
    for slots in range(whole.origin.architecture.top_k, 8):
        again, same = decoded(build(name, slots=slots), prompt(20), 40)
        assert again == tokens
        assert torch.equal(same, scores), f"{slots} slots"


def test_each_layer_has_its_own_number_of_slots(build: Build, prompt: Prompt) -> None:
    _, scores = decoded(build("qwen3"), prompt(20), 20)
    engine = build("qwen3", slots_by_layer=(3, 8, 5))
    assert engine.cache.capacities == (3, 8, 5)
    assert torch.equal(decoded(engine, prompt(20), 20)[1], scores)
    assert [len(resident) for resident in engine.cache.resident] == [3, 8, 5]


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfu-decay", "static"])
def test_every_policy_gives_the_same_bits(policy: str, build: Build, prompt: Prompt, tmp_path: Path) -> None:
    (tmp_path / "popular.json").write_text(str([[*range(8)]] * 3))
    given = {"popularity": str(tmp_path / "popular.json")} if policy == "static" else {}
    _, scores = decoded(build("qwen3"), prompt(20), 30)
    engine = build("qwen3", slots=4, policy=policy, **given)
    assert torch.equal(decoded(engine, prompt(20), 30)[1], scores)
    assert sum(one.misses for one in engine.cache.decoded) > 0


TIERS: list[dict[str, Any]] = [
    {"tier": tier, "read_path": path}
    for tier, path in itertools.product(
        ("pinned", "disk", "page-cache"), ("record", "record-parallel", "scattered", "scattered-parallel")
    )
]


@pytest.mark.parametrize("given", TIERS, ids=lambda given: "-".join(given.values()))
@pytest.mark.parametrize("name", MODELS)
def test_every_tier_and_read_path_gives_the_same_bits(
    name: str, given: dict[str, Any], build: Build, prompt: Prompt
) -> None:
    _, scores = decoded(build(name), prompt(20), 12)
    engine = build(name, slots=3, **given)
    assert torch.equal(decoded(engine, prompt(20), 12)[1], scores)
    assert engine.host.served.read == (0 if given["tier"] == "pinned" else engine.slots.installs)


def test_records_kept_in_host_memory_give_the_same_bits(build: Build, prompt: Prompt) -> None:
    _, scores = decoded(build("qwen3"), prompt(20), 30)
    engine = build("qwen3", slots=3, tier="disk", host_memory="1MiB")
    assert torch.equal(decoded(engine, prompt(20), 30)[1], scores)
    served = engine.host.served
    assert served.from_memory > 0
    assert served.read + served.from_memory == engine.slots.installs


def test_a_prefill_far_longer_than_the_slots(
    build: Build, prompt: Prompt, theirs: Callable[[str, list[int]], Tensor]
) -> None:
    tokens = prompt(300)
    engine = build("qwen3", slots=3)
    scores = engine.decoder.prefill([tokens], every=True)
    torch.testing.assert_close(scores, theirs("qwen3", tokens), rtol=0, atol=1e-4)
    assert torch.equal(scores, build("qwen3").decoder.prefill([tokens], every=True))
    # Each expert once, however few slots there are.
    assert engine.slots.installs == 3 * 8


def test_prompts_that_alternate_disjoint_routes(build: Build) -> None:
    """The router is replaced so that even positions need experts 0 to 2 and odd ones 5 to 7: no slot survives a step."""

    def replay(layer: int, texts: Tensor, positions: Tensor) -> Tensor:
        even = (positions % 2 == 0)[:, None]
        return torch.where(even, -torch.arange(8.0), torch.arange(8.0)) + 0.1 * layer

    # Even: the first step needs what the prefill's last wave has just driven out.
    tokens = [1, 2, 3, 4, 5, 6]
    engines = [build("qwen3"), build("qwen3", slots=3)]
    scores = []
    for engine in engines:
        engine.decoder.replay = replay
        scores.append(decoded(engine, tokens, 40)[1])
    assert torch.equal(scores[0], scores[1])
    assert sum(one.hits for one in engines[1].cache.decoded) == 0


@pytest.mark.parametrize("name", ["olmoe", "qwen3"])
@pytest.mark.parametrize("encoding", ["stored", "q4"])
def test_the_plain_version_agrees(
    name: str, encoding: str, build: Build, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    if encoding == "q4":
        # The experts' width of 96 is no multiple of 64.
        monkeypatch.setattr("coresident.engines.moe.layout.record.GROUP", 32)
    engine = build(name, slots=3, encoding=encoding)
    tokens, scores = decoded(engine, prompt(12), 20)
    plain = oracle(engine.origin, engine.form, engine.decoder.dense)
    with torch.inference_mode():
        reference = plain.logits(torch.tensor(prompt(12) + tokens[:-1]))[11:]
    torch.testing.assert_close(scores, reference, rtol=0, atol=1e-4)


def test_rows_of_a_batch_say_what_each_says_alone(build: Build, prompt: Prompt) -> None:
    prompts = [prompt(9, 1), prompt(30, 2), prompt(4, 3)]
    batched = build("qwen3", batch=3, slots=4)
    together = generate(batched.decoder, prompts, 25)
    alone = [generate(build("qwen3", slots=4).decoder, [one], 25).tokens[0] for one in prompts]
    assert together.tokens == alone
    # Three rows may need more experts than there are slots: then a step takes several waves.
    assert sum(one.steps for one in batched.cache.prefilled) > 3 * 3
