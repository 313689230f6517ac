"""Whole pools in one process: reported as any pool is, each learner by name, and nothing left behind."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from coresident.engines.pool import inspection
from coresident.engines.pool.base import base
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.run import drive
from coresident.errors import MachineError, UserError
from coresident.workload import Reporter

# Two of one rank, whose adapters would fit into each other's place.
OWN = [{"rank": 8, "alpha": 4.0}, {"rank": 8, "steps": 3, "seed": 7}, {"passes": 1, "pairs": 6}]
SICK = [*OWN[:2], {"learning_rate": 1e30, "warmup_steps": 0}]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(base.CACHE, str(tmp_path_factory.mktemp("cache")))
        yield


def settings(**values: Any) -> DPO:
    given = {
        "base": {"config": "tiny"}, "sharing": "packed", "learners": 3, "steps": 5, "max_length": 48,
        "data": {"pairs": 8}, "own": OWN,
    }  # fmt: skip
    return DPO.model_validate(given | values)


def cell(place: Path) -> Reporter:
    return Reporter(events=place / "events", work=place / "work")


def events(place: Path, kind: str) -> dict[str, Any]:
    lines = [
        json.loads(line) for file in (place / "events").iterdir() for line in file.read_text().splitlines()
    ]
    return {line.get("name", line.get("id")): line for line in lines if line["event"] == kind}


def test_it_reports_as_the_same_learners_in_processes_of_their_own(tmp_path: Path) -> None:
    found = {}
    for sharing in ("packed", "fork"):
        drive(settings(sharing=sharing, dtype="float64"), cell(tmp_path / sharing))
        controls = events(tmp_path / sharing, "control")
        assert {control["passed"] for control in controls.values()} == {True}
        found[sharing] = {
            kind: events(tmp_path / sharing, kind) for kind in ("series", "digest", "worker", "metric")
        }
    packed, apart = found["packed"], found["fork"]
    for kind in ("series", "digest", "worker"):
        assert packed[kind].keys() == apart[kind].keys()
    assert packed["metric"].keys() == apart["metric"].keys() - {
        "fork_seconds",
        "golden_to_first_step_seconds",
    }
    assert packed["metric"]["learners_done"]["value"] == 3
    assert packed["digest"]["base"]["value"] == apart["digest"]["base"]["value"]
    for name, line in apart["series"].items():
        assert packed["series"][name]["values"] == pytest.approx(line["values"], rel=1e-9, abs=1e-9), name
    for number, steps in enumerate((5, 3, 3)):
        worker = packed["worker"][f"learner-{number}"]
        tokens = packed["series"][f"learner-{number}.tokens"]["values"]
        assert len(tokens) == steps
        assert worker["work"] == sum(tokens[1:])
        assert worker["start"] < worker["end"]
        mine, theirs = (tmp_path / sharing / "work" / f"learner-{number}" for sharing in ("packed", "fork"))
        # PEFT's own files, with what is the learner's own in them.
        config = json.loads((mine / "adapter_config.json").read_text())
        assert config == json.loads((theirs / "adapter_config.json").read_text())
        assert config["r"] == (8, 8, 16)[number]
        one, other = (load_file(place / "adapter_model.safetensors") for place in (mine, theirs))
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_learner_that_stops_is_named_and_its_last_good_adapter_kept(tmp_path: Path) -> None:
    found = drive(settings(own=SICK, on_failure="continue"), cell(tmp_path))
    assert list(found.failed) == ["learner 2"]
    assert (found.failed["learner 2"].status, found.failed["learner 2"].reason) == (
        "nonfinite",
        "the loss is nan at step 2",
    )
    assert sorted(found.learned) == [0, 1]
    work = tmp_path / "work"
    assert not (work / "learner-2").exists()
    kept = load_file(work / "learner-2-last-good" / "adapter_model.safetensors")
    assert all(value.isfinite().all() for value in kept.values())
    assert json.loads((work / "learner-2-last-good" / "coresident.json").read_text()) == {"steps": 1}
    assert events(tmp_path, "metric")["learners_done"]["value"] == 2


def test_it_ends_the_pool_by_name_where_that_is_asked(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"^learner 2: the loss is nan at step 2"):
        drive(settings(own=SICK), cell(tmp_path))
    # What was trained until then is on record.
    assert len(events(tmp_path, "series")["learner-0.loss"]["values"]) == 2
    assert (tmp_path / "work" / "learner-2-last-good").is_dir()


def test_an_adapter_that_overflows_costs_its_siblings_nothing(tmp_path: Path) -> None:
    found = drive(
        settings(own=[{"learning_rate": 1e38, "warmup_steps": 0}, {}, {}], on_failure="continue"),
        cell(tmp_path),
    )
    assert list(found.failed) == ["learner 0"]
    assert found.failed["learner 0"].status == "nonfinite"
    assert sorted(found.learned) == [1, 2]
    assert (tmp_path / "work" / "learner-1" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("window", [8, 128])
def test_a_base_that_attends_within_a_window_is_refused_if_rows_are_longer(
    tiny_base: Path, tmp_path: Path, window: int
) -> None:
    copy = tmp_path / "base"
    shutil.copytree(tiny_base, copy)
    config = json.loads((copy / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    config |= {"layer_types": ["sliding_attention"] * config["num_hidden_layers"]}
    (copy / "config.json").write_text(json.dumps(config))
    asked = settings(own=[], base={"path": str(copy)}, step="compiled")
    if window < asked.max_length:
        with pytest.raises(MachineError, match=f"attends within {window} of {asked.max_length} tokens"):
            drive(asked, cell(tmp_path))
    else:
        assert drive(asked, cell(tmp_path)).learned


def test_a_killed_pack_is_named_and_leaves_nobody(
    tmp_path: Path, below: Callable[..., list[psutil.Process]]
) -> None:
    before = set(psutil.Process().children(recursive=True))

    def kill() -> None:
        while not (found := below("pack_process")):
            time.sleep(0.01)
        time.sleep(1)
        found[0].kill()

    helper = threading.Thread(target=kill, daemon=True)
    helper.start()
    with pytest.raises(MachineError, match=r"^pack: it was killed by SIGKILL"):
        drive(settings(steps=100_000, own=[]), cell(tmp_path))
    helper.join()
    assert set(psutil.Process().children(recursive=True)) == before


def test_it_needs_the_base_once_and_one_process(tmp_path: Path) -> None:
    packed, apart = inspection.inspect(settings(own=[])), inspection.inspect(settings(own=[], sharing="none"))
    assert packed.workers == 1
    assert packed.on_card * 3 == apart.on_card
    assert packed.memory < apart.memory


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"dropout": 0.1}, "dropout: a policy with dropout is another function than its reference"),
        (
            {"schedule": "solo"},
            "schedule: solo is one learner after another, and sharing: packed all at once",
        ),
        ({"sharing": "fork", "step": "eager"}, "step: only sharing: packed has several kinds of it"),
        (
            {"adapter_products": "bfloat16"},
            "adapter_products: bfloat16 is for a bfloat16 base, and dtype is float32",
        ),
        ({"own": [{"steps": 1}]}, "own.0.steps"),
        ({"own": [{"base": "x"}]}, "a learner has no base of its own, .*; give base beside own"),
        ({"own": [{"rank": 4}, {"dtype": "float64"}]}, "a learner has no dtype of its own"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_sentence(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings(**values)


def test_what_it_does_not_do_is_said_first() -> None:
    with pytest.raises(UserError, match="evaluates nothing on the way, and eval_files is set"):
        inspection.inspect(settings(eval_files=["held.jsonl"]))


def test_a_graph_is_for_a_card(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="step: captured is a CUDA graph, and this runs on the CPU"):
        drive(settings(step="captured"), cell(tmp_path))


def test_over_a_base_in_4_bits_it_learns_the_same(tmp_path: Path) -> None:
    found = {}
    for sharing in ("packed", "fork"):
        asked = settings(
            sharing=sharing, base={"config": "tiny", "quantise": "nf4"}, optimizer="adamw8bit", own=[]
        )
        drive(asked, cell(tmp_path / sharing))
        found[sharing] = events(tmp_path / sharing, "series")
        assert events(tmp_path / sharing, "control")["base-unchanged"]["passed"]
    for name, line in found["fork"].items():
        assert found["packed"][name]["values"] == pytest.approx(line["values"], rel=1e-3, abs=1e-3), name
