"""The pool as a tool: a user's files in, adapters out; killed, stopped and broken trainings that lose nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from coresident.text import arithmetic, pythondocs

SETS = ("learning_rate=1e-3", "max_length=48", "rank=4", "alpha=8", "checkpoint_every=5", "threads=1")
STEPS = 120
Train = Callable[..., tuple[int, Any, str]]


@pytest.fixture(scope="module")
def place(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two learners' files, held-out pairs, and a base of their own."""
    place = tmp_path_factory.mktemp("pool")
    shutil.copytree(tiny_base, place / "base")
    for name, made in (
        ("a", arithmetic.pairs(8, 1)),
        ("b", pythondocs.pairs(8, 2, 48)),
        ("held", pythondocs.pairs(5, 3, 48)),
    ):
        lines = [{"prompt": one.prompt, "chosen": one.chosen, "rejected": one.rejected} for one in made]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def words(place: Path, out: str, *more: str, steps: int = STEPS) -> list[str]:
    argv = ["pool", "train", "--out", str(place / out), "--json", "--base", str(place / "base")]
    argv += ["--data", str(place / "a.jsonl"), str(place / "b.jsonl")]
    for one in SETS:
        argv += ["--set", one]
    return [*argv, "--steps", str(steps), *more]


@pytest.fixture(scope="session")
def train(called: Callable[..., Any]) -> Train:
    """Trains to the end. Returns the status, what was printed as JSON, and what was said beside it."""

    def trained(place: Path, out: str, *more: str, steps: int = STEPS) -> tuple[int, Any, str]:
        told = called(*words(place, out, *more, steps=steps))
        return told.status, json.loads(told.out) if told.out else None, told.err

    return trained


def learned(place: Path, out: str) -> dict[str, Any]:
    """All that a finished training says of what was learned: every step's numbers, and the adapters' bytes."""
    steps: dict[Any, Any] = {}
    for line in map(json.loads, (place / out / "metrics.jsonl").read_text().splitlines()):
        key = (line["learner"], line["step"], "evaluation" in line)
        assert key not in steps, "a step is told once"
        steps[key] = {name: value for name, value in line.items() if name != "seconds"}
    adapters = {
        number: (place / out / f"learner-{number}" / "adapter_model.safetensors").read_bytes()
        for number in (0, 1)
    }
    return {"steps": steps, "adapters": adapters}


@pytest.fixture(scope="module")
def whole(place: Path, train: Train) -> dict[str, Any]:
    """The training that nothing interrupts."""
    held = ("--eval-data", str(place / "held.jsonl"), "--eval-every", "50")
    status, result, said = train(place, "whole", *held)
    assert (status, said) == (0, "")
    return {"result": result, **learned(place, "whole")}


def test_each_file_becomes_an_adapter_that_peft_loads_and_that_differs_from_the_base(
    place: Path, whole: dict[str, Any]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[5, 6, 7, 8]])

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)

    logits = [base()(input_ids=ids).logits]
    for number in (0, 1):
        model = PeftModel.from_pretrained(base(), place / "whole" / f"learner-{number}").eval()
        logits.append(model(input_ids=ids).logits)
    assert not torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert not torch.equal(logits[1], logits[2])
    assert [one["status"] for one in whole["result"]["learners"]] == ["done", "done"]
    assert {key[:2] for key in whole["steps"]} == {(n, step) for n in (0, 1) for step in range(1, STEPS + 1)}
    assert {key[1] for key in whole["steps"] if key[2]} == {50, 100, STEPS}


def test_evaluation_afterwards_says_what_it_said_during(place: Path, whole: dict[str, Any]) -> None:
    argv = [sys.executable, "-m", "coresident", "pool", "evaluate", "--json", "--base", str(place / "base")]
    argv += ["--adapter", str(place / "whole" / "learner-1"), "--data", str(place / "held.jsonl")]
    argv += ["--set", "max_length=48", "--set", "threads=1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found == pytest.approx(
        {
            name: value
            for name, value in whole["result"]["learners"][1]["evaluation"].items()
            if name != "step"
        },
        rel=1e-6,
    )


def under_way(place: Path, out: str, *more: str) -> subprocess.Popen[str]:
    """A training past its second checkpoint."""
    held = ("--eval-data", str(place / "held.jsonl"), "--eval-every", "50")
    argv = [sys.executable, "-m", "coresident", *words(place, out, *held, *more)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = place / out / "metrics.jsonl"
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < 30:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    return process


@pytest.fixture
def one_learner_killed(below: Callable[..., list[psutil.Process]]) -> Callable[[Any], None]:
    def kill(process: subprocess.Popen[str]) -> None:
        below("processes.zygote", driver=process.pid)[1].kill()
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 2
        learners = json.loads(out)["learners"]
        assert sorted(one["status"] for one in learners) == ["done", "failed"]
        assert (
            next(one["reason"] for one in learners if one["status"] == "failed") == "it was killed by SIGKILL"
        )

    return kill


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "stopped", "one_learner_killed"])
def test_what_ended_early_goes_on_to_the_very_same_result(
    place: Path, whole: dict[str, Any], request: pytest.FixtureRequest, end: str, train: Train
) -> None:
    request.getfixturevalue(end)(under_way(place, end))
    held = ("--eval-data", str(place / "held.jsonl"), "--eval-every", "50")
    status, result, said = train(place, end, *held, "--resume")
    assert (status, said) == (0, "")
    assert learned(place, end) == {"steps": whole["steps"], "adapters": whole["adapters"]}
    assert [one["digest"] for one in result["learners"]] == [
        one["digest"] for one in whole["result"]["learners"]
    ]


@pytest.mark.slow
def test_a_pool_that_is_killed_names_its_log_and_goes_on(
    place: Path, whole: dict[str, Any], train: Train, below: Callable[..., list[psutil.Process]]
) -> None:
    process = under_way(place, "bereft")
    below("processes.zygote", driver=process.pid)[0].kill()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and "the zygote process died (SIGKILL)" in said
    assert f"see {place / 'bereft' / 'log'} for what that process wrote last; go on with --resume" in said
    held = ("--eval-data", str(place / "held.jsonl"), "--eval-every", "50")
    assert train(place, "bereft", *held, "--resume")[0] == 0
    assert learned(place, "bereft") == {"steps": whole["steps"], "adapters": whole["adapters"]}


def test_a_finished_training_has_nothing_left_to_do_and_says_so(place: Path, whole: dict[str, Any]) -> None:
    argv = [sys.executable, "-m", "coresident", "pool", "train", "--resume", "--out", str(place / "whole")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "every learner is trained already: nothing is left to do" in done.stdout
    assert learned(place, "whole") == {"steps": whole["steps"], "adapters": whole["adapters"]}


@pytest.mark.slow
def test_a_start_that_fails_leaves_nothing_in_the_way_of_the_next(
    tiny_base: Path, place: Path, tmp_path: Path, train: Train
) -> None:
    shutil.copytree(place, tmp_path / "copy", ignore=shutil.ignore_patterns("whole", "killed", "stopped"))
    file = tmp_path / "copy" / "base" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    status, _, said = train(tmp_path / "copy", "out", steps=2)
    assert status == 2 and "the base has no tensor 'model.norm.weight'" in said
    assert said.endswith("-> give the weights that belong to this config.json, complete\n")
    assert "'model.norm.weight'" in (tmp_path / "copy" / "out" / "log").read_text()
    shutil.copy(tiny_base / "model.safetensors", file)
    status, result, said = train(tmp_path / "copy", "out", steps=2)
    assert (status, said) == (0, "")
    assert [one["status"] for one in result["learners"]] == ["done", "done"]


def test_a_finished_training_goes_on_when_more_steps_are_asked_for(
    place: Path, whole: dict[str, Any], called: Callable[..., Any]
) -> None:
    shutil.copytree(place / "whole", place / "longer")
    told = called(
        "pool", "train", "--json", "--resume", "--out", str(place / "longer"), "--steps", str(STEPS + 5)
    )
    assert (told.status, told.err) == (0, "")
    assert [one["steps"] for one in json.loads(told.out)["learners"]] == [STEPS + 5] * 2
    assert learned(place, "longer")["adapters"][0] != whole["adapters"][0]


def changed_weight(place: Path) -> None:
    file = place / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})


def changed_pair(place: Path) -> None:
    file = place / "b.jsonl"
    file.write_text(file.read_text().replace("e", "i", 1))


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        (changed_weight, (), "--resume: the base has changed since"),
        (changed_pair, (), "learner-1.safetensors cannot be continued: its data have changed since"),
        (None, ("--set", "beta=0.2"), "--resume: beta was 0.1 and is now 0.2"),
        (None, ("--learners", "1"), "--resume: learners was 2 and is now 1"),
        (None, ("--steps", "3"), f"--resume: {STEPS} steps were asked for, and 3 are fewer"),
    ],
)
def test_what_is_no_longer_the_same_training_is_refused_and_kept(
    place: Path,
    whole: dict[str, Any],
    tmp_path: Path,
    change: Any,
    more: tuple[str, ...],
    said: str,
    train: Train,
) -> None:
    shutil.copytree(place, tmp_path / "copy", ignore=shutil.ignore_patterns("killed", "stopped", "longer"))
    if change is not None:
        change(tmp_path / "copy")
    before = {
        file.name: file.read_bytes() for file in (tmp_path / "copy" / "whole" / "checkpoints").iterdir()
    }
    status, result, err = train(tmp_path / "copy", "whole", *("--resume", "--set", "on_failure=stop"), *more)
    assert (status, result) == (2, None)
    assert said in err
    # One remedy, the one that helps.
    assert err.count("\n  -> ") == 1 and "; give the data" not in err and "see " not in err
    after = {file.name: file.read_bytes() for file in (tmp_path / "copy" / "whole" / "checkpoints").iterdir()}
    assert after == before
    assert learned(tmp_path / "copy", "whole")["adapters"] == whole["adapters"]


def other_base(place: Path) -> tuple[str, ...]:
    shutil.copytree(place / "base", place / "other", dirs_exist_ok=True)
    tensors = load_file(place / "other" / "model.safetensors")
    tensors = {name: value + 0.01 for name, value in tensors.items()}
    save_file(tensors, place / "other" / "model.safetensors", metadata={"format": "pt"})
    return (
        "--base", str(place / "other"), "--start-from", str(place / "whole" / "learner-0"), "--reference", "base",
    )  # fmt: skip


BAD: dict[str, tuple[Any, str]] = {
    "no such layer": (lambda _: ("--set", "targets=[q_prj]"), "has no layer 'q_prj' to adapt"),
    "rows above the base's context": (lambda _: ("--set", "max_length=512"), "is more than the context"),
    "another's directory": (lambda place: ("--out", str(place / "base")), "and no training"),
    "a directory in use": (lambda place: ("--out", str(place / "whole")), "holds a training already"),
    "nothing to resume": (lambda _: ("--resume",), "holds no training to resume"),
    "a rate that is no number": (
        lambda _: ("--set", "learning_rate=nan"),
        "learning_rate: must be a number, not 'nan'",
    ),
    "a rate that is NaN": (lambda _: ("--set", "learning_rate=.nan"), "learning_rate"),
    "an unknown key": (lambda _: ("--set", "learningrate=1"), "unknown key 'learningrate'"),
    "a long prompt": (lambda _: ("--set", "max_length=8"), "a.jsonl line 1: the prompt is"),
    "no file": (lambda place: ("--data", str(place / "none.jsonl")), "none.jsonl cannot be read"),
    "MPS without a card": (lambda _: ("--set", "mps=on"), "mps is about a CUDA device"),
    "a budget without a card": (lambda _: ("--set", "device_memory=8GiB"), "device_memory is about a CUDA"),
    "no held-out file": (
        lambda place: ("--eval-data", str(place / "none.jsonl")),
        "none.jsonl cannot be read",
    ),
    "a peer": (lambda _: ("--sharing", "trl"), "--sharing trl keeps no checkpoints"),
    "no learners": (lambda _: ("--learners", "0"), "learners"),
    "no such device": (lambda _: ("--device", "cdua"), "unknown device 'cdua'"),
    "another base's adapter": (other_base, "learner-0 was trained on another base"),
    "an adapter held to nothing": (
        lambda place: ("--start-from", str(place / "whole" / "learner-0")),
        "is not zero, so that it must be said what the policy is held to",
    ),
    "no adapter": (lambda place: ("--start-from", str(place)), "describes no LoRA adapter"),
}


@pytest.mark.parametrize(("more", "said"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence_with_its_remedy(
    place: Path, whole: dict[str, Any], tmp_path: Path, called: Callable[..., Any], more: Any, said: str
) -> None:
    out = tmp_path / "out"
    argv = words(place, "unused", steps=3)
    argv[argv.index("--out") + 1] = str(out)
    told = called(*argv, *more(place))
    assert (told.status, told.out) == (2, "")
    problem, remedy = told.err.strip().split("\n  -> ")
    assert said in problem
    assert remedy
    assert "no LoRA adapter" not in problem or "learner-K" in remedy
    assert "Traceback" not in told.err
    assert not out.exists()


@pytest.mark.slow
def test_a_training_goes_on_from_an_adapter(place: Path, whole: dict[str, Any], train: Train) -> None:
    start = ("--start-from", str(place / "whole" / "learner-0"))
    losses = {}
    for reference in ("base", "start"):
        status, result, said = train(place, f"from-{reference}", *start, "--reference", reference, steps=2)
        assert (status, said) == (0, "")
        losses[reference] = result["learners"][0]["first_loss"]
    assert losses["start"] == pytest.approx(0.693147, abs=1e-6)
    assert losses["base"] < 0.6


def test_completions_are_learned_by_their_own_loss(place: Path) -> None:
    file = place / "sft.jsonl"
    lines = [{"prompt": one.prompt, "completion": one.chosen} for one in arithmetic.pairs(6, 4)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = [sys.executable, "-m", "coresident", "pool", "train", "--json", "--loss", "sft", "--learners", "2"]
    argv += ["--out", str(place / "sft"), "--base", str(place / "base"), "--data", str(file), "--steps", "30"]
    argv += ["--eval-data", str(file), "--set", "learning_rate=1e-2"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for one in json.loads(done.stdout)["learners"]:
        assert one["last_loss"] < 0.9 * one["first_loss"]
        assert set(one["evaluation"]) == {"loss", "tokens", "scored", "step"}
