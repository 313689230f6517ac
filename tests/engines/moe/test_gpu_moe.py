"""On a card: the fused step's bits, the order of copies and kernels, and what happens when a wait is dropped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coresident.engines.moe import assemble, measured, rates
from coresident.engines.moe.assemble import Engine
from coresident.engines.moe.decoder.program import Program
from coresident.engines.moe.generate import generate
from coresident.engines.moe.parameters import Decode
from coresident.engines.moe.prompts import Prompted
from coresident.engines.moe.residency import experts, kernels
from coresident.engines.moe.residency.slots import Slots
from coresident.errors import UserError

pytestmark = pytest.mark.gpu
PROMPT = [(7 * number + number * number) % 200 for number in range(40)]
Build = Callable[..., Engine]
# Cycles: tens of milliseconds on any card.
LONG = 50_000_000


@pytest.fixture
def build(saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """An engine on the card, closed afterwards."""
    monkeypatch.setenv("CORESIDENT_CACHE", str(tmp_path / "cache"))
    torch.backends.cuda.matmul.allow_tf32 = False
    opened: list[Engine] = []

    def built(name: str, batch: int = 1, **given: Any) -> Engine:
        model = {"config": name} if name == "tiny" else {"path": str(saved(name))}
        asked = Decode.model_validate({"model": model, "dtype": "float32", **given})
        origin = assemble.open_model(asked.model)
        opened.append(assemble.build(asked, origin, torch.device("cuda", 0), 200, batch))
        return opened[-1]

    yield built
    for engine in opened:
        engine.close()


def scores(engine: Engine, steps: int = 40, prompts: list[list[int]] | None = None) -> Tensor:
    """Logits [steps, B, V] of greedy steps."""
    found = measured.decode(engine, Prompted(prompts or [PROMPT], ""), 0, steps)
    return torch.stack(found.logits)


@pytest.mark.parametrize("name", ["olmoe", "qwen3", "ours"])
def test_fused_decoding_is_transformers(name: str, build: Build, saved: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    engine = build(name, slots=3)
    tokens = generate(engine.decoder, [PROMPT], 130).tokens[0]
    theirs = AutoModelForCausalLM.from_pretrained(saved(name), dtype=torch.float32).to("cuda")
    with torch.inference_mode():
        reference = theirs(torch.tensor([PROMPT + tokens[:-1]], device="cuda")).logits[0, len(PROMPT) - 1 :]
    assert tokens == reference.argmax(-1).tolist()
    again = build(name, slots=3)
    forced = torch.tensor([tokens], device="cuda")
    found = measured.decode(again, Prompted([PROMPT], "", forced), 0, 129)
    torch.testing.assert_close(torch.stack(found.logits)[:, 0], reference[1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("fills", ["host", "device"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["olmoe", "qwen3"])
def test_every_capacity_gives_the_bits_of_one_graph(name: str, dtype: str, fills: str, build: Build) -> None:
    whole = build(name, dtype=dtype)
    wanted = scores(whole)
    assert [segment.cut for segment in whole.decoder._programs[1].segments] == [None]  # type: ignore[attr-defined]
    for slots in range(whole.origin.architecture.top_k, 8):
        engine = build(name, slots=slots, dtype=dtype, fills=fills)
        assert torch.equal(scores(engine), wanted), f"{slots} slots"
        cuts = [one.cut for one in engine.decoder._programs[1].segments]  # type: ignore[attr-defined]
        assert cuts == ([0, 1, 2, None] if fills == "host" else [None])
        assert engine.decoder.filled_by == fills


def test_four_bits_too(build: Build) -> None:
    wanted = scores(build("tiny", encoding="q4"))
    for fills in ("host", "device"):
        assert torch.equal(scores(build("tiny", encoding="q4", slots=3, fills=fills)), wanted)
    plain = scores(build("tiny", encoding="q4", slots=3, kernels="plain"))
    torch.testing.assert_close(plain, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fills", ["host", "device"])
@pytest.mark.parametrize("policy", ["lru", "lfu", "lfu-decay", "static"])
def test_whoever_decides_decides_the_same(policy: str, fills: str, build: Build, tmp_path: Path) -> None:
    """As the plain decoder on the host, also when a second text is read after the first."""
    popular = tmp_path / "popular.json"
    popular.write_text(json.dumps([[(3 * expert) % 5 for expert in range(8)] for _ in range(3)]))
    given = {"slots": 3, "policy": policy} | ({"popularity": str(popular)} if policy == "static" else {})
    fused, plain = build("olmoe", fills=fills, **given), build("olmoe", kernels="plain", **given)
    assert (fused.decoder.filled_by, plain.decoder.filled_by) == ("host", "host")
    for prompts in ([PROMPT], [PROMPT[5:20]]):
        scores(fused, prompts=prompts), scores(plain, prompts=prompts)
        assert fused.decoder.filled_by == fills
        assert fused.cache.decoded == plain.cache.decoded
        assert fused.cache.resident == plain.cache.resident
        assert fused.slots.installs == plain.slots.installs
        assert fused.host.served == plain.host.served


def test_a_record_is_brought_by_the_fastest_way(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that bring nothing would be the fastest of all; copies are what is left where there are no kernels."""
    from coresident.engines.moe.residency import unattended

    engine = build("olmoe", slots=3)
    both = rates.record_seconds(engine)
    monkeypatch.setattr(unattended, "fetch", lambda *_, **__: torch.cuda._sleep(LONG))  # type: ignore[attr-defined]
    copies = rates.record_seconds(engine)
    monkeypatch.setattr(unattended, "fetch", lambda *_, **__: None)
    assert rates.record_seconds(engine) < min(both, copies)
    assert both < 2 * copies


def test_rows_that_may_need_more_than_there_are_slots_are_the_hosts(build: Build) -> None:
    prompts = [PROMPT[:9], PROMPT[5:30]]
    wanted = scores(build("olmoe", batch=2), 20, prompts)
    for slots, filled_by in ((3, "host"), (4, "device"), (6, "device")):
        engine = build("olmoe", batch=2, slots=slots)
        assert torch.equal(scores(engine, 20, prompts), wanted)
        assert engine.decoder.filled_by == filled_by
    with pytest.raises(UserError, match="give at least 4 slots a layer or fewer rows"):
        scores(build("olmoe", batch=2, slots=3, fills="device"), 1, prompts)


@pytest.mark.parametrize("where", ["warm-up", "capture"])
def test_a_capture_that_fails_can_be_had_again(
    where: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where memory was short for a moment: the step that comes after is the one that would have come."""
    embed = Program._embed

    def refused(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    def late(self: Program) -> None:
        torch.cuda._sleep(LONG)
        embed(self)

    def alone(fails: bool) -> tuple[Tensor, Any]:
        decoder = build("olmoe", batch=2, slots=4, fills="device").decoder
        decoder.warm(2)
        decoder.prefill([PROMPT[:9], PROMPT[5:30]])
        decoder.keep([1])
        token = torch.tensor([7], device="cuda")
        if fails:
            with monkeypatch.context() as short, pytest.raises(torch.OutOfMemoryError):
                if where == "capture":
                    short.setattr(torch.cuda, "CUDAGraph", refused)
                else:
                    # All kernels before the one that fails are still to run then.
                    short.setattr(Program, "_embed", late)
                    short.setattr(Program, "_finish", refused)
                decoder.step(token)
        found = torch.stack([decoder.step(token).clone() for _ in range(5)])
        decoder.settle()
        return found, decoder.experts.cache.decoded

    (failed, counted), (wanted, all_counted) = alone(True), alone(False)
    assert torch.equal(failed, wanted) and counted == all_counted


def test_kernels_that_fetch_another_record_are_seen(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = scores(build("olmoe"), 12)
    fetch = kernels.fetch

    class Neighbour:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **sizes: fetch[grid](*given[:4], max(given[4] - 1, 0), *given[5:], **sizes)

    monkeypatch.setattr(kernels, "fetch", Neighbour())
    assert not torch.equal(scores(build("olmoe", slots=3, fills="device"), 12), wanted)


@pytest.mark.parametrize(
    "given",
    [
        {"tier": "disk"},
        {"tier": "disk", "read_path": "record-parallel"},
        {"tier": "page-cache"},
        {"tier": "disk", "host_memory": "1MiB"},
        {"tier": "disk", "read_path": "scattered-parallel"},
        {"tier": "page-cache", "read_path": "scattered"},
    ],
    ids=str,
)
def test_every_tier_gives_the_same_bits(given: dict[str, Any], build: Build) -> None:
    engine = build("olmoe", slots=3, **given)
    assert torch.equal(scores(engine), scores(build("olmoe")))
    assert engine.host.memory.pinned and engine.host.memory.records.is_pinned()
    assert engine.host.served.read > 0


def test_a_batch_that_needs_more_experts_than_there_are_slots(build: Build) -> None:
    prompts = [PROMPT[:9], PROMPT[5:30], PROMPT[20:24], PROMPT[3:8]]
    wanted = scores(build("qwen3", batch=4), 30, prompts)
    engine = build("qwen3", batch=4, slots=3)
    assert torch.equal(scores(engine, 30, prompts), wanted)
    assert sum(one.steps for one in engine.cache.prefilled) > 9


def test_rows_that_are_over_leave_the_batch(build: Build) -> None:
    prompts = [PROMPT[:9], PROMPT[5:30], PROMPT[20:24]]
    whole = generate(build("qwen3", batch=3, slots=4).decoder, prompts, 20).tokens
    end = whole[1][6]
    found = generate(build("qwen3", batch=3, slots=4).decoder, prompts, 20, ends={end}).tokens
    for one, other in zip(found, whole, strict=True):
        assert one == (other[: other.index(end) + 1] if end in other else other)


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fill is late by a long kernel on the stream that it runs on."""
    install = Slots._install

    def late(self: Slots, slot: int, record: Tensor) -> Any:
        torch.cuda._sleep(LONG // 10)
        return install(self, slot, record)

    monkeypatch.setattr(Slots, "_install", late)


def test_kernels_wait_for_late_copies(build: Build, slow_copies: None) -> None:
    wanted = scores(build("olmoe", kernels="fused"), 12)
    assert torch.equal(scores(build("olmoe", slots=3, fills="host"), 12), wanted)


def test_a_dropped_wait_for_a_copy_is_seen(
    build: Build, slow_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = scores(build("olmoe"), 12)
    engine = build("olmoe", slots=3, fills="host")
    monkeypatch.setattr(Slots, "_kernel_waits", lambda *_: None)
    assert not torch.equal(scores(engine, 12), wanted)


def test_a_dropped_wait_for_a_kernel_is_seen(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are late here: a fill that does not wait for them overwrites what they are still to read."""
    swiglu = experts.swiglu

    def late(x: Tensor, weights: Any) -> Tensor:
        torch.cuda._sleep(LONG // 10)
        return swiglu(x, weights)

    wanted = build("olmoe").decoder.prefill([PROMPT], every=True)
    monkeypatch.setattr(experts, "swiglu", late)
    assert torch.equal(build("olmoe", slots=2).decoder.prefill([PROMPT], every=True), wanted)
    monkeypatch.setattr(Slots, "_fill_waits", lambda *_: None)
    assert not torch.equal(build("olmoe", slots=2).decoder.prefill([PROMPT], every=True), wanted)


def copied(engine: Engine) -> tuple[int, int]:
    """Of 20 steps of one row: records installed, and copies from the host as the profiler counts them."""
    scores(engine, 5)
    before = engine.slots.installs
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for token in range(20):
            engine.decoder.step(torch.tensor([token], device="cuda"))
        torch.cuda.synchronize()
    engine.decoder.settle()
    return engine.slots.installs - before, sum("HtoD" in event.name for event in profile.events())


def test_one_copy_installs_one_record(build: Build) -> None:
    """Counted by the profiler: copies from the host of a record's size, and none of its parts."""
    installed, copies = copied(build("olmoe", slots=3, fills="host"))
    assert installed > 0
    # Besides, a row of the map for each layer that missed, and each token.
    assert installed <= copies <= installed + 2 * 20 * 3


def test_kernels_that_fetch_leave_nothing_to_copy(build: Build) -> None:
    installed, copies = copied(build("olmoe", slots=3, fills="device"))
    assert installed > 0
    assert copies == 20  # each token, and no record


def test_host_memory_is_pinned_and_has_the_size_asked_for(build: Build) -> None:
    memory = build("olmoe").host.memory
    assert memory.pinned and memory.records.is_pinned()
    assert len(memory._mapping) == 24 * memory.records.shape[1]
