"""`moe.decode` as the lab runs it: what it reports of a decoding, and what it found out about its tier."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coresident.engines.moe import assemble, commands
from coresident.engines.moe import cell as measuring
from coresident.engines.moe.decoder.decoder import Decoder
from coresident.engines.moe.inspection import inspect
from coresident.engines.moe.layout.file import read_header
from coresident.engines.moe.models import architecture
from coresident.engines.moe.models.origins import Drawn
from coresident.engines.moe.parameters import Decode
from coresident.engines.moe.residency.slots import Slots
from coresident.engines.moe.tiers.raw import RawReads
from coresident.engines.moe.traces import files
from coresident.engines.moe.traces.traces import Traces
from coresident.engines.moe.workload import decode as workload
from coresident.errors import MachineError, UserError
from coresident.lab.study.load import load
from coresident.text import tokenizer
from coresident.text.corpus import CorpusSource, documents
from coresident.workload import Reporter

Saved = Callable[[str], Path]
Make = Callable[..., Traces]

REPLAY = {"routing": "replay", "trace": "traces"}


@pytest.fixture
def ran(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs a cell of the tiny OLMoE; its events by kind and name."""
    monkeypatch.setenv("CORESIDENT_CACHE", str(tmp_path / "cache"))

    def run(**given: Any) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": {"path": str(saved("olmoe"))}, "tokens": 12, "warmup": 3, **given}
        events: list[dict[str, Any]] = []
        reporter = Reporter(tmp_path / "events", tmp_path, show=lambda line: events.append(dict(line)))
        measuring.run(Decode.model_validate_json(json.dumps(asked)), reporter)
        found: dict[str, Any] = {}
        for line in events:
            if line["event"] in ("metric", "control", "digest", "series"):
                found[line["name"]] = line
            elif line["event"] == "environment":
                found["environment"] = line["values"]
            elif line["event"] == "sample":
                found.setdefault("samples", []).append(line["value"])
        return found

    return run


def test_every_metric_is_declared_and_the_promised_ones_are_there(ran: Callable[..., dict[str, Any]]) -> None:
    found = ran(slots=3, bound=True, reference="transformers")
    declared = {one.name: one.unit for one in workload.metrics}
    reported = {
        name: one["unit"]
        for name, one in found.items()
        if isinstance(one, dict) and one.get("event") == "metric"
    }
    assert all(declared[name] == unit for name, unit in reported.items())
    assert {"tokens_per_second", "hit_rate", "bytes_per_token", "logit_difference", "of_bound"} <= set(
        reported
    )
    assert found["logit_difference"]["value"] < 1e-4
    assert found["tokens_differ"]["value"] == 0
    assert 0 < found["hit_rate"]["value"] < 1
    form_bytes = 3 * 64 * 96 * 4
    assert found["bytes_per_token"]["value"] == found["misses_per_token"]["value"] * form_bytes
    assert len(found["samples"]) == 12
    host = sum(
        found[f"host_{name}_us"]["value"] for name in ("wait", "policy", "read", "install", "launch", "other")
    )
    assert host == pytest.approx(1000 * sum(found["samples"]) / 12, rel=1e-6)
    said = found["environment"]
    assert said["capacities"] == [3, 3, 3]
    assert (said["policy"], said["tier"], said["warmup"], said["prompts_split"]) == (
        "lru",
        "pinned",
        3,
        "drawn",
    )
    assert (found["tier"]["passed"], found["kernels"]["passed"]) == (True, True)


def test_the_bound_is_what_its_terms_give(ran: Callable[..., dict[str, Any]]) -> None:
    found = {name: one["value"] for name, one in ran(slots=3, bound=True).items() if "value" in one}
    assert found["resident_ms"] > 0 and found["record_copy_us"] > 0 and found["misses_per_token"] > 0
    seconds = (
        found["resident_ms"] / 1e3
        + 3 * found["sync_us"] / 1e6
        + found["misses_per_token"] * found["record_copy_us"] / 1e6
    )
    assert found["bound_tokens_per_second"] == pytest.approx(1 / seconds)
    assert found["of_bound"] == pytest.approx(found["tokens_per_second"] * seconds)


def test_arms_that_only_move_experts_agree_in_every_bit(ran: Callable[..., dict[str, Any]]) -> None:
    arms: list[dict[str, Any]] = [
        {},
        {"slots": 3},
        {"slots": 4, "policy": "lfu"},
        {"slots": 2, "tier": "disk"},
        {"slots": 3, "tier": "page-cache", "read_path": "scattered-parallel"},
    ]
    found = [ran(**arm) for arm in arms]
    assert len({one["logits"]["value"] for one in found}) == 1
    assert all(one["tokens"]["values"] == found[0]["tokens"]["values"] for one in found)
    assert all(one["logit_difference"]["value"] == 0 for one in found)


def test_tokens_that_differ_from_the_references_are_counted(tmp_path: Path) -> None:
    """Over rows and steps: a count can be claimed to be 0, where a share of 1 has noise on both sides."""
    from coresident.engines.moe.cell import _difference
    from coresident.engines.moe.measured import Measured

    ours = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    theirs = torch.tensor([[[0.0, 1.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]])
    _difference(Reporter(tmp_path / "events", tmp_path), list(theirs), Measured(logits=list(ours)))
    lines = [json.loads(line) for file in (tmp_path / "events").iterdir() for line in file.open()]
    assert {line["name"]: line["value"] for line in lines}["tokens_differ"] == 2


def test_scores_that_are_no_numbers_are_no_small_difference(tmp_path: Path) -> None:
    """Whichever step they are of: Python's own maximum keeps what it saw first."""
    from coresident.engines.moe.cell import _difference
    from coresident.engines.moe.measured import Measured

    good, bad = torch.zeros(1, 4), torch.full((1, 4), torch.nan)
    with pytest.raises(UserError, match="'logit_difference' is nan"):
        _difference(Reporter(tmp_path / "events", tmp_path), [good, bad], Measured(logits=[good, good]))


def test_a_decoding_into_nothing_has_no_speed(
    ran: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FloatingPointError is what the lab records as nonfinite."""
    install = Slots._install

    def wrong(self: Slots, slot: int, record: torch.Tensor) -> Any:
        return install(self, slot, torch.full_like(record, 255) if self.installs == 40 else record)

    monkeypatch.setattr(Slots, "_install", wrong)
    with pytest.raises(FloatingPointError, match="no finite number"):
        ran(slots=2)


def test_four_bits_differ_from_transformers_and_not_from_their_own_resident_run(
    ran: Callable[..., dict[str, Any]],
) -> None:
    asked: dict[str, Any] = {"model": {"config": "tiny"}, "encoding": "q4", "slots": 2}
    assert ran(**asked)["logit_difference"]["value"] == 0
    assert ran(**asked, reference="oracle")["logit_difference"]["value"] < 1e-4


@pytest.mark.parametrize("tier", ["pinned", "disk"])
def test_experts_in_bfloat16_take_two_bytes_a_weight_whatever_the_files_hold(
    ran: Callable[..., dict[str, Any]], tier: str
) -> None:
    """Exported models hold float32, which an arm that is called bfloat16 must not move."""
    stored, half = (ran(encoding=one, slots=2, tier=tier) for one in ("stored", "bf16"))
    assert [one["environment"]["encoding"] for one in (stored, half)] == ["F32", "BF16"]
    missed = half["misses_per_token"]["value"]
    assert half["bytes_per_token"]["value"] == missed * 3 * 64 * 96 * 2
    assert half["logit_difference"]["value"] == 0
    plain = ran(encoding="bf16", slots=2, tier=tier, reference="oracle")
    assert plain["logit_difference"]["value"] < 1e-4


@pytest.mark.parametrize("name", ["moe-capacity", "moe-capacity-trained", "moe-fills"])
def test_arms_that_are_called_bf16_keep_experts_so(name: str) -> None:
    study = load(name).study
    kept = {
        arm: {**study.parameters, **changed}["encoding"]
        for arm, changed in study.arms.items()
        if arm.startswith("bf16")
    }
    assert kept and set(kept.values()) == {"bf16" if "path" in study.parameters["model"] else "stored"}


def test_a_cold_disk_reports_its_rate_beside_the_raw_one(ran: Callable[..., dict[str, Any]]) -> None:
    found = ran(slots=2, tier="disk")
    told = found["tier"]
    assert told["passed"] and told["ran"]["direct"] and told["ran"]["cached"] == 0
    assert found["raw_read_mib_per_second"]["value"] > 0
    assert found["fetch_of_raw"]["value"] == pytest.approx(
        found["fetch_mib_per_second"]["value"] / found["raw_read_mib_per_second"]["value"]
    )


@pytest.mark.parametrize(
    "tier", [{"tier": "disk"}, {"tier": "page-cache"}, {"tier": "disk", "host_memory": "1MiB"}], ids=str
)
def test_the_raw_rate_is_read_between_timed_steps_and_changes_nothing_else(
    ran: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tier: dict[str, str]
) -> None:
    order: list[str] = []
    step, follow = Decoder.step, RawReads.follow

    def stepped(self: Decoder, tokens: torch.Tensor) -> torch.Tensor:
        order.append("step")
        return step(self, tokens)

    def followed(self: RawReads, fetched: int) -> None:
        order.append("raw")
        time.sleep(0.05)
        follow(self, fetched)

    monkeypatch.setattr(Decoder, "step", stepped)
    alone = ran(slots=2, reference="none")
    order.clear()
    monkeypatch.setattr(RawReads, "follow", followed)
    found = ran(slots=2, **tier, reference="none")
    assert order == ["step"] * 3 + ["step", "raw"] * 12
    for name in ("hit_rate", "misses_per_token", "bytes_per_token", "logits"):
        assert found[name]["value"] == alone[name]["value"]
    assert found["misses_per_token"]["value"] * 12 > 40
    # The pauses' 12 x 50 ms are in no step's time, which what host time is charged to adds up to.
    assert sum(found["samples"]) < 600


def test_the_bytes_that_are_read_raw_are_those_that_steps_fetched(
    ran: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RawReads] = []
    start = RawReads.__post_init__

    def kept(self: RawReads) -> None:
        start(self)
        made.append(self)

    monkeypatch.setattr(RawReads, "__post_init__", kept)
    found = ran(slots=2, tier="disk", reference="none")
    fetched = found["bytes_per_token"]["value"] * 12
    size = 3 * 64 * 96 * 4
    assert fetched <= made[0].nbytes < fetched + 8 * size
    ran(slots=2, tier="disk", read_path="scattered")
    ran(slots=2, tier="pinned", layout=made[0].layout.path.as_posix())
    assert len(made) == 1


def test_a_warm_cache_taken_for_a_cold_disk_fails_the_control(
    ran: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from coresident.engines.moe.tiers import disk

    monkeypatch.setattr(disk, "drop", disk.warm)
    told = ran(slots=2, tier="disk")["tier"]
    assert told["passed"] is False
    assert "pages were in memory" in told["reason"]


def test_reads_that_lost_their_flag_fail_the_control(
    ran: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from coresident.engines.moe.tiers import readers
    from coresident.engines.moe.tiers.disk import DiskFile

    monkeypatch.setattr(readers, "DiskFile", lambda path, direct: DiskFile(path, False))
    told = ran(slots=2, tier="disk")["tier"]
    assert (told["passed"], told["reason"]) == (False, "reads went through the page cache")


@pytest.mark.usefixtures("no_direct_reads")
def test_where_there_are_no_direct_reads_the_page_cache_serves_without_a_raw_rate(
    ran: Callable[..., dict[str, Any]],
) -> None:
    with pytest.raises(MachineError, match="has no O_DIRECT"):
        ran(slots=2, tier="disk")
    found = ran(slots=2, tier="page-cache")
    assert found["tier"]["passed"] and "raw_read_mib_per_second" not in found


def test_a_damaged_record_is_no_reference_for_itself(
    ran: Callable[..., dict[str, Any]], saved: Saved, tmp_path: Path
) -> None:
    commands.layout(saved("olmoe"), tmp_path / "records", "stored", lambda *_: None)
    header = read_header(tmp_path / "records")
    with (tmp_path / "records").open("r+b") as file:
        file.seek(header.offset(1, 4) + 40)
        file.write(b"\x00\x01\x02\x3f")
    for given in ({}, {"host_memory": "8MiB"}):
        with pytest.raises(UserError, match="layer 1, expert 4 has a bad checksum"):
            ran(slots=2, tier="disk", layout=str(tmp_path / "records"), **given)


def test_a_wrong_slot_shows_in_the_logit_difference(
    ran: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    install = Slots._install

    def wrong(self: Slots, slot: int, record: torch.Tensor) -> Any:
        return install(self, slot, record.roll(4096) if self.installs == 30 else record)

    monkeypatch.setattr(Slots, "_install", wrong)
    assert ran(slots=2, reference="oracle")["logit_difference"]["value"] > 1e-4


def test_the_counter_is_the_simulator_s_on_the_decoder_s_own_routes(saved: Saved) -> None:
    """A trace of what the decoder chose, played through the simulator: the same hits in every layer, for every policy."""
    from coresident.engines.moe.cache import Cache
    from coresident.engines.moe.generate import generate
    from coresident.engines.moe.policies import policy

    for name, slots in (("lru", 2), ("lfu", 3), ("lfu-decay", 5), ("lru", 8)):
        asked = Decode.model_validate(
            {"model": {"path": str(saved("olmoe"))}, "slots": slots, "policy": name, "preload": False}
        )
        seen: list[list[list[int]]] = []
        engine = assemble.build(
            asked,
            assemble.open_model(asked.model),
            torch.device("cpu"),
            100,
            1,
            watch=lambda layer, logits, chosen, seen=seen: seen.append(chosen.tolist()),  # type: ignore[misc]
        )
        generate(engine.decoder, [[1, 2, 3, 4, 5]], 40)
        played = Cache(policy(name, 3, 8), (slots,) * 3, 8)
        for number, rows in enumerate(seen):
            layer = number % 3
            if number < 3:
                for _ in played.prefill(layer, np.unique(rows).tolist()):
                    pass
            else:
                played.step(layer, rows[0])
        assert played.decoded == engine.cache.decoded
        assert played.prefilled == engine.cache.prefilled
        assert engine.slots.installs == sum(one.misses for one in [*played.decoded, *played.prefilled])


def traced(saved: Saved, tmp_path: Path) -> Path:
    """Traces of a shape that the tiny drawn model has, too, with routing that follows a rule of its own."""
    from coresident.engines.moe.traces.files import write
    from coresident.engines.moe.traces.manifest import Router, Sampling
    from coresident.engines.moe.traces.traces import Trace, Traces

    source = np.random.default_rng(0)
    logits = source.normal(size=(2, 30, 3, 8)).astype(np.float32)
    chosen = np.argsort(-logits, axis=-1, kind="stable")[..., :2].astype(np.uint8)
    model = Router(
        identity="0" * 64, architecture="olmoe", layers=(0, 1, 2), experts=8, top_k=2, normalise=False
    )
    prompts = tuple(
        Trace(f"p{n}", "prose", split, 6, source.integers(0, 200, 30).astype(np.int32), chosen[n], logits[n])
        for n, split in enumerate(("fit", "held-out"))
    )
    write(
        Traces(model, Sampling(max_tokens=24, temperature=0.0, seed=0, by="made"), prompts),
        tmp_path / "traces",
    )
    return tmp_path / "traces"


def test_replayed_routing_is_the_trace_s(
    ran: Callable[..., dict[str, Any]], saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coresident.engines.moe.residency.experts import Experts

    path = traced(saved, tmp_path)
    asked: list[tuple[int, list[list[int]]]] = []
    through = Experts.run

    def run(self: Experts, layer: int, x: Any, chosen: torch.Tensor, weights: Any, prefill: bool) -> Any:
        if not prefill:
            asked.append((layer, chosen.tolist()))
        return through(self, layer, x, chosen, weights, prefill)

    monkeypatch.setattr(Experts, "run", run)
    given = {
        "model": {"config": "tiny"},
        "routing": "replay",
        "trace": str(path),
        "slots": 3,
        "reference": "none",
    }
    found = ran(**given)
    wanted = files.read(path).of("held-out").prompts[0]
    assert [chosen[0] for _, chosen in asked] == [
        wanted.experts[6 + step, layer].tolist() for step in range(15) for layer in range(3)
    ]
    assert found["environment"]["routing"] == "replay" and found["environment"]["prompts_split"] == "held-out"
    assert found["tokens"]["values"][:-1] == wanted.tokens[6:21].tolist()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"tokens": 40},
            r"0 held-out prompts with router logits and at least 43 decoded tokens \(any has 24 at most\)",
        ),
        ({"model": {"config": "tiny", "layers": 2}}, "of 3 x 8, 2, and the model 2 x 8, 2"),
        ({"prompts": {"batch": 2}}, "2 from number 0 are asked for"),
    ],
)
def test_traces_that_do_not_fit_are_refused(
    given: dict[str, Any], said: str, ran: Callable[..., dict[str, Any]], saved: Saved, tmp_path: Path
) -> None:
    path = traced(saved, tmp_path)
    with pytest.raises(UserError, match=said):
        ran(**{"model": {"config": "tiny"}, "routing": "replay", "trace": str(path), **given})


def test_static_keeps_what_the_fit_prompts_chose_most(
    ran: Callable[..., dict[str, Any]], saved: Saved, tmp_path: Path
) -> None:
    path = traced(saved, tmp_path)
    found = ran(model={"config": "tiny"}, policy="static", popularity=str(path), slots=3)
    assert found["logit_difference"]["value"] == 0


def test_popularity_of_another_model_s_traces_is_refused(
    ran: Callable[..., dict[str, Any]], saved: Saved, tmp_path: Path
) -> None:
    path = traced(saved, tmp_path)
    with pytest.raises(UserError, match=r"olmoe is of model \w+, and the traces are of model"):
        ran(policy="static", popularity=str(path), slots=3)


def test_a_drawn_model_can_be_read_scattered(ran: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    arms: list[dict[str, Any]] = [
        {},
        {"tier": "disk", "read_path": "scattered", "slots": 2},
        {"tier": "disk", "slots": 2},
    ]
    found = [ran(model={"config": "tiny", "layers": 2}, **arm) for arm in arms]
    assert len({one["logits"]["value"] for one in found}) == 1
    assert found[1]["tier"]["passed"] and found[1]["fetch_mib_per_second"]["value"] > 0


def test_texts_of_the_held_out_part(tiny_model: Path, ran: Callable[..., dict[str, Any]]) -> None:
    found = ran(
        model={"path": str(tiny_model)}, slots=3, prompts={"source": "python-docs", "batch": 2, "length": 20}
    )
    assert found["environment"]["prompts_split"] == "held-out"
    assert found["environment"]["prompt_tokens"] == [20, 20]


def test_a_text_is_followed_whatever_the_model_would_say(
    tiny_model: Path, ran: Callable[..., dict[str, Any]]
) -> None:
    """As the whole text is read at once: the scores after each of its tokens."""
    given = {"source": "python-docs", "length": 20, "batch": 2, "seed": 1}
    asked = {"model": {"path": str(tiny_model)}, "reference": "transformers"}
    found = ran(**asked, slots=3, prompts={**given, "follow": True})
    texts = [one.text for one in documents(CorpusSource()) if one.validation and one.family == "prose"]
    known = [tokenizer.load(tiny_model)(text)["input_ids"] for text in texts]
    long = [tokens for tokens in known if len(tokens) >= 20 + 15][1:3]
    steps = [[float(tokens[20 + step]) for tokens in long] for step in range(15)]
    assert found["tokens"]["values"][: 15 * 2] == [token for step in steps for token in step]
    assert found["environment"]["continuation"] == "given"
    assert found["logit_difference"]["value"] < 1e-4
    different = [len(set(tokens[23:35])) / 12 for tokens in long]
    assert found["distinct_1"]["value"] == pytest.approx(sum(different) / 2)
    assert ran(**asked, prompts=given)["environment"]["continuation"] == "own"


def test_a_short_text_is_followed_to_its_end_from_a_shorter_prompt(
    tiny_model: Path, ran: Callable[..., dict[str, Any]]
) -> None:
    text = "def add(one, other): return one + other  # the sum of two numbers"
    tokens = tokenizer.load(tiny_model)(text)["input_ids"]
    assert len(tokens) > 16
    asked = {"model": {"path": str(tiny_model)}, "prompts": {"text": [text], "length": 90, "follow": True}}
    found = ran(**asked)
    assert found["environment"]["prompt_tokens"] == [len(tokens) - 15]
    assert found["tokens"]["values"][:15] == tokens[-15:]
    with pytest.raises(UserError, match=f"a text of {len(tokens)} tokens cannot be followed for"):
        ran(**asked, tokens=len(tokens) - 3)


def test_a_followed_token_that_the_model_does_not_know_is_refused(
    tiny_model: Path, tmp_path: Path, ran: Callable[..., dict[str, Any]]
) -> None:
    """A tokenizer may know more than the model: its prompts are refused, and so is the text after them."""
    place = tmp_path / "model"
    shutil.copytree(tiny_model, place)
    known = json.loads((place / "tokenizer.json").read_text())
    known["added_tokens"].append({**known["added_tokens"][0], "id": 320, "content": "<|new|>"})
    (place / "tokenizer.json").write_text(json.dumps(known))
    text = "def add(one, other): return one + other  # the sum<|new|>"
    with pytest.raises(UserError, match="holds token 320, and the model knows 320"):
        ran(model={"path": str(place)}, prompts={"text": [text], "follow": True})


def test_where_no_text_is_long_enough_to_be_followed_fewer_tokens_are_advised(
    tiny_model: Path, ran: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(UserError, match=r"0 texts of 800015 tokens or more; .*fewer tokens"):
        ran(
            model={"path": str(tiny_model)},
            prompts={"source": "python-docs", "length": 800_000, "follow": True},
        )


def test_drawn_tokens_are_followed_too(ran: Callable[..., dict[str, Any]]) -> None:
    found = [ran(slots=slots, prompts={"batch": 2, "length": 4, "follow": True}) for slots in (3, 8)]
    assert found[0]["tokens"]["values"][:30] == found[1]["tokens"]["values"][:30]
    assert found[0]["logits"]["value"] == found[1]["logits"]["value"]
    assert found[0]["distinct_1"]["value"] > 0.9


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"slots": 1}, "1 slots cannot hold the 2 experts"),
        (
            {"slots": 3, "fills": "device", "prompts": {"batch": 2}},
            "the 4 experts that a step may need into 3",
        ),
        ({"slots": 9}, "more than its 8 experts"),
        ({"device_memory": "lots"}, "is no size"),
        ({"layout": "/nowhere/experts"}, "/nowhere/experts does not exist"),
        ({"model": {"config": "olmoe-7b"}}, "no model shape 'olmoe-7b'"),
        ({"model": {"path": "/nowhere"}}, "config.json does not exist"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(given: dict[str, Any], said: str, saved: Saved) -> None:
    asked = Decode.model_validate({"model": {"path": str(saved("olmoe"))}, **given})
    with pytest.raises(UserError, match=said):
        inspect(asked)


@pytest.mark.parametrize(
    "given",
    [
        {"prompts": {"length": 10}, "tokens": 8},
        {"prompts": {"text": ["one token at least"]}, "tokens": 17},
        {"prompts": {"source": "python-docs", "length": 4000}, "tokens": 17},
        {"prompts": {"source": "python-docs", "length": 10, "follow": True}, "tokens": 8},
        {**REPLAY, "tokens": 13},
        {**REPLAY, "tokens": 8, "prompts": {"batch": 2}},
        {**REPLAY, "tokens": 8, "prompts": {"seed": 1}},
    ],
    ids=str,
)
def test_a_text_beyond_the_context_is_refused_before_anything_starts(
    given: dict[str, Any], saved: Saved, made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the cell's sentence, from a config and what a trace says of itself; one token fewer will do."""
    monkeypatch.chdir(tmp_path)
    config = json.loads((saved("olmoe") / "config.json").read_text())
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config | {"max_position_embeddings": 20}))
    prompts = made(layers=3, experts=8, k=2, prefill=5).prompts
    # Held out are the third and the fourth, which is longer.
    longer = replace(made(layers=3, experts=8, k=2), prompts=(*prompts[:3], replace(prompts[3], prefill=10)))
    files.write(longer, Path("traces"))
    asked = Decode.model_validate_json(json.dumps({"model": {"path": "model"}, "warmup": 3, **given}))
    with pytest.raises(UserError) as planned:
        inspect(asked)
    assert str(planned.value).startswith("21 tokens are beyond the model's context of 20")
    with pytest.raises(UserError) as ran:
        origin = Drawn(architecture.read(Path("model")), 0)
        assemble.build(asked, origin, torch.device("cpu"), 21, 1)
    assert str(planned.value) == str(ran.value)
    inspect(asked.model_copy(update={"tokens": asked.tokens - 1}))


def test_a_trace_that_says_nothing_of_itself_is_refused_before_anything_starts(tmp_path: Path) -> None:
    asked = {"model": {"config": "tiny"}, "routing": "replay", "trace": str(tmp_path)}
    with pytest.raises(UserError, match=r"is no set of traces: it has no readable manifest\.json"):
        inspect(Decode.model_validate(asked))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"slots": 3, "device_memory": "1GiB"}, "exclude each other"),
        ({"routing": "replay"}, "needs a trace"),
        ({"policy": "static"}, "popularity=FILE"),
        ({"prompts": {"text": ("one",), "batch": 2}}, "1 texts for a batch of 2; set batch"),
        ({**REPLAY, "prompts": {"follow": True}}, "leave prompts.follow out"),
        ({"read_path": "scattered", "encoding": "q4"}, "leave encoding, 4 bits and layout out"),
        ({"host_memory": "1GiB"}, "pinned holds every expert"),
        ({"model": {}}, "is either path"),
    ],
)
def test_parameters_that_contradict_each_other(given: dict[str, Any], said: str, saved: Saved) -> None:
    with pytest.raises(ValueError, match=said):
        Decode.model_validate({"model": {"path": str(saved("olmoe"))}, **given})


def test_a_cell_says_what_it_needs(saved: Saved) -> None:
    needs = inspect(Decode.model_validate({"model": {"path": str(saved("qwen3"))}, "slots": 3}))
    assert needs.on_card == 3 * 3 * 3 * 64 * 96 * 2
    assert needs.memory > needs.on_card
    assert saved("qwen3") / "config.json" in needs.inputs


def test_records_that_stay_in_host_memory_are_needed_there(saved: Saved) -> None:
    """As much as is asked for, and no more than all experts take."""
    model = {"path": str(saved("olmoe"))}
    asked = [
        inspect(Decode.model_validate({"model": model, "slots": 3, "tier": "disk", **given}))
        for given in ({}, {"host_memory": "128KiB"}, {"host_memory": "1TiB"})
    ]
    alone, some, most = (one.memory - one.on_card for one in asked)
    assert (alone, some, most) == (0, 128 * 1024, 3 * 8 * 3 * 64 * 96 * 2)
