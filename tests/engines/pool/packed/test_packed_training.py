"""`pool train --sharing packed`: a pack's learners are kept one by one, and go on to the very same bits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coresident.engines.pool.learning import outputs
from coresident.text import arithmetic

End = Callable[[subprocess.Popen[str]], None]

STEPS = 90
Train = Callable[..., tuple[int, Any, str]]
# Of other ranks and lengths: the first is through long before the second.
OWN = '[{"rank": 8, "steps": 35}, {"learning_rate": 2e-3, "seed": 7}]'
SETS = ("learning_rate=1e-3", "max_length=48", "rank=4", "alpha=8", "checkpoint_every=5", "threads=1")


@pytest.fixture(scope="module")
def place(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two learners' files and a base."""
    place = tmp_path_factory.mktemp("packed")
    shutil.copytree(tiny_base, place / "base")
    for name, seed in (("a", 1), ("b", 2)):
        lines = [
            {"prompt": one.prompt, "chosen": one.chosen, "rejected": one.rejected}
            for one in arithmetic.pairs(8, seed)
        ]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def words(
    place: Path, out: str, *more: str, sharing: str = "packed", own: str = OWN, data: str = "ab"
) -> list[str]:
    argv = ["pool", "train", "--out", str(place / out), "--json"]
    argv += ["--base", str(place / "base"), "--data", *[str(place / f"{name}.jsonl") for name in data]]
    for one in (*SETS, f"own={own}"):
        argv += ["--set", one]
    return [*argv, "--sharing", sharing, "--steps", str(STEPS), *more]


@pytest.fixture(scope="session")
def train(called: Callable[..., Any]) -> Train:
    """Trains to the end. Returns the status, what was printed as JSON, and what was said beside it."""

    def trained(place: Path, out: str, *more: str, **kind: str) -> tuple[int, Any, str]:
        told = called(*words(place, out, *more, **kind))
        return told.status, json.loads(told.out) if told.out else None, told.err

    return trained


def learned(place: Path, out: str) -> dict[str, Any]:
    """Every step's numbers, each told once, and the adapters' bytes."""
    steps: dict[Any, Any] = {}
    for line in map(json.loads, (place / out / "metrics.jsonl").read_text().splitlines()):
        assert (line["learner"], line["step"]) not in steps, "a step is told once"
        steps[line["learner"], line["step"]] = {
            name: value for name, value in line.items() if name != "seconds"
        }
    adapters = {
        number: (place / out / f"learner-{number}" / "adapter_model.safetensors").read_bytes()
        for number in (0, 1)
    }
    return {"steps": steps, "adapters": adapters}


@pytest.fixture(scope="module")
def wholes(place: Path, train: Train) -> Callable[[str], dict[str, Any]]:
    """The training that nothing interrupts, by its optimizer, and the setting that it has of its own."""

    @cache
    def made(optimizer: str) -> dict[str, Any]:
        more = ("--set", f"optimizer={optimizer}")
        status, result, said = train(place, f"whole-{optimizer}", *more)
        assert (status, said) == (0, "")
        assert [one["steps"] for one in result["learners"]] == [35, STEPS]
        found = learned(place, f"whole-{optimizer}")
        assert set(found["steps"]) == {(0, step) for step in range(1, 36)} | {
            (1, step) for step in range(1, STEPS + 1)
        }
        return {"optimizer": optimizer, "more": more, "result": result, **found}

    return made


@pytest.fixture(params=["adamw", "adamw8bit"])
def whole(request: pytest.FixtureRequest, wholes: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return wholes(request.param)


def under_way(place: Path, out: str, lines: int, *more: str, **kind: str) -> subprocess.Popen[str]:
    """A training, in a process of its own, that has told of so many steps."""
    argv = [sys.executable, "-m", "coresident", *words(place, out, *more, **kind)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = place / out / "metrics.jsonl"
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.005)
    return process


@pytest.mark.slow
# With both learners under way, and with the first through.
@pytest.mark.parametrize(
    ("whole", "end", "lines"), [("adamw", "killed", 30), ("adamw8bit", "stopped", 85)], indirect=["whole"]
)
def test_what_ended_early_goes_on_to_the_very_same_bits(
    place: Path, whole: dict[str, Any], request: pytest.FixtureRequest, end: str, lines: int, train: Train
) -> None:
    out = f"{end}-{lines}-{whole['optimizer']}"
    request.getfixturevalue(end)(under_way(place, out, lines, *whole["more"]))
    assert not (place / out / "learner-1").exists()
    status, result, said = train(place, out, *whole["more"], "--resume")
    assert (status, said) == (0, "")
    assert learned(place, out) == {"steps": whole["steps"], "adapters": whole["adapters"]}
    assert [one["digest"] for one in result["learners"]] == [
        one["digest"] for one in whole["result"]["learners"]
    ]


def kept(place: Path, out: str) -> list[int]:
    return [outputs.steps_of(outputs.checkpoint(place / out, number)) for number in (0, 1)]


@pytest.mark.slow
def test_all_are_kept_together_also_where_one_ends_between_two_checkpoints(
    place: Path, killed: End, train: Train
) -> None:
    """One alone would go on without the other's rows, and these have other lengths: other bits."""
    for name, most in (("l", 30), ("s", 2)):
        words_of = [
            " ".join(["apple", "river", "stone"] * 10)[: 6 * (1 + number % most)] for number in range(16)
        ]
        lines = [{"prompt": "say", "chosen": f" {one}", "rejected": f" no {one}"} for one in words_of]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = '[{"rank": 8, "steps": 13}, {"learning_rate": 2e-3, "seed": 7}]'
    more = ["--set", "max_length=200", "--set", "checkpoint_every=500"]
    status, _, said = train(place, "uneven", *more, own=own, data="ls")
    assert (status, said) == (0, "")
    killed(under_way(place, "uneven-killed", 30, *more, own=own, data="ls"))
    assert kept(place, "uneven-killed") == [13, 13]
    status, _, said = train(place, "uneven-killed", *more, "--resume", own=own, data="ls")
    assert (status, said) == (0, "")
    assert learned(place, "uneven-killed") == learned(place, "uneven")


@pytest.mark.slow
def test_what_goes_on_is_held_to_the_adapter_it_began_with(place: Path, killed: End, train: Train) -> None:
    """Not to what it was when it was kept."""
    start = ["--set", "own=[{}, {}]", "--steps", "6"]
    status, _, said = train(place, "start", *start)
    assert (status, said) == (0, "")
    own = '[{"steps": 35}, {"learning_rate": 2e-3, "seed": 7}]'
    more = ("--start-from", str(place / "start" / "learner-0"), "--reference", "start", "--set", f"own={own}")
    status, _, said = train(place, "held", *more)
    assert (status, said) == (0, "")
    killed(under_way(place, "held-killed", 30, *more))
    status, _, said = train(place, "held-killed", *more, "--resume")
    assert (status, said) == (0, "")
    assert learned(place, "held-killed") == learned(place, "held")


@pytest.mark.slow
def test_a_pack_whose_kind_of_step_was_said_goes_on_in_processes(
    place: Path, stopped: End, train: Train
) -> None:
    """`step` is a pack's alone, so that it is set back where the pack is left."""
    stopped(under_way(place, "eager", 30, "--set", "step=eager"))
    status, _, said = train(place, "eager", "--resume", "--set", "step=auto", sharing="fork")
    assert (status, said) == (0, "")


def test_a_torn_checkpoint_is_named_with_what_to_do(place: Path, whole: dict[str, Any], train: Train) -> None:
    name = f"torn-{whole['optimizer']}"
    shutil.copytree(place / f"whole-{whole['optimizer']}", place / name)
    (place / name / "result.json").unlink()
    file = outputs.checkpoint(place / name, 0)
    file.write_bytes(file.read_bytes()[:999])
    status, _, said = train(place, name, *whole["more"], "--resume")
    assert status == 2 and str(file) in said and "remove it to start that learner anew" in said


def close(one: Path, other: Path) -> bool:
    ours, theirs = (load_file(place / "adapter_model.safetensors") for place in (one, other))
    ours_all, theirs_all = (
        torch.cat([found[name].flatten() for name in sorted(found)]) for found in (ours, theirs)
    )
    return bool((ours_all - theirs_all).norm() < 1e-3 * theirs_all.norm())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whole", "first", "then"),
    [("adamw", "fork", "packed"), ("adamw", "packed", "fork"), ("adamw8bit", "packed", "fork")],
    indirect=["whole"],
)
def test_learners_go_on_in_a_pack_and_out_of_it(
    place: Path, whole: dict[str, Any], stopped: End, first: str, then: str, train: Train
) -> None:
    """A checkpoint is a learner's, however it was trained; but for moments in 8 bits, which are cut otherwise."""
    out = f"{first}-{whole['optimizer']}"
    stopped(under_way(place, out, 60, *whole["more"], sharing=first))
    status, _, said = train(place, out, *whole["more"], "--resume", sharing=then)
    if whole["optimizer"] == "adamw8bit":
        assert (
            status == 2
            and "cannot be continued: moments in 8 bits go on neither in a pack from elsewhere" in said
        )
        assert "set sharing back" in said
        return
    assert (status, said) == (0, "")
    for number in (0, 1):
        name = f"learner-{number}"
        assert close(place / out / name, place / "whole-adamw" / name)


def test_all_is_trained_and_more_can_be_asked_for(
    place: Path, whole: dict[str, Any], called: Callable[..., Any]
) -> None:
    name = f"whole-{whole['optimizer']}"
    told = called("pool", "train", "--resume", "--out", str(place / name))
    assert (told.status, told.err) == (0, "")
    assert "every learner is trained already" in told.out
    shutil.copytree(place / name, place / f"longer-{name}")
    more = [str(place / f"longer-{name}"), "--steps", str(STEPS + 5), "--json"]
    told = called("pool", "train", "--resume", "--out", *more)
    assert (told.status, told.err) == (0, "")
    assert [one["steps"] for one in json.loads(told.out)["learners"]] == [35, STEPS + 5]
    after = learned(place, f"longer-{name}")
    assert after["adapters"][0] == whole["adapters"][0]
    assert after["adapters"][1] != whole["adapters"][1]


@pytest.mark.slow
def test_a_learner_that_stops_being_finite_stops_alone_and_so_again(place: Path, train: Train) -> None:
    own = '[{"learning_rate": 1e30, "warmup_steps": 0}, {"seed": 7}]'
    status, result, _ = train(place, "sick", own=own)
    assert status == 2
    assert [one["status"] for one in result["learners"]] == ["nonfinite", "done"]
    assert (place / "sick" / "learner-1").is_dir() and not (place / "sick" / "learner-0").exists()
    kept = (place / "sick" / "learner-1" / "adapter_model.safetensors").read_bytes()
    status, again, _ = train(place, "sick", "--resume", own=own)
    assert status == 2
    assert [one["status"] for one in again["learners"]] == ["nonfinite", "done"]
    assert (place / "sick" / "learner-1" / "adapter_model.safetensors").read_bytes() == kept


def test_evaluation_on_the_way_is_refused(place: Path, train: Train) -> None:
    status, _, said = train(place, "evaluated", "--eval-data", str(place / "a.jsonl"))
    assert status == 2 and "sharing: packed evaluates nothing on the way" in said
    assert "coresident pool evaluate" in said
    assert not (place / "evaluated").exists()
