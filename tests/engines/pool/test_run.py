"""Whole pools, with all their processes: the same learning however the base is shared, and failures that are
named.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from coresident.engines.pool.base import base
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.processes.crew import Patience
from coresident.engines.pool.run import drive
from coresident.errors import MachineError
from coresident.workload import Reporter

# Finds processes below this one; something done to two learners' pids.
Below = Callable[..., list[psutil.Process]]
Act = Callable[[list[int]], None]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(base.CACHE, str(tmp_path_factory.mktemp("cache")))
        yield


def settings(**values: Any) -> DPO:
    given = {"base": {"config": "tiny"}, "learners": 2, "steps": 3, "max_length": 48, "data": {"pairs": 8}}
    return DPO.model_validate(given | values)


def cell(place: Path, **values: Any) -> Reporter:
    return Reporter(events=place / "events", work=place / "work", **values)


def events(place: Path, kind: str) -> dict[str, Any]:
    lines = [
        json.loads(line) for file in (place / "events").iterdir() for line in file.read_text().splitlines()
    ]
    return {line.get("name", line.get("id")): line for line in lines if line["event"] == kind}


def environment(place: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for file in (place / "events").iterdir():
        for line in map(json.loads, file.read_text().splitlines()):
            merged |= line["values"] if line["event"] == "environment" else {}
    return merged


WAYS = {
    "copy": {"sharing": "none"},
    "mapped": {"sharing": "mapped"},
    "fork": {"sharing": "fork"},
    "fork-copy": {"sharing": "fork-copy"},
    "solo": {"sharing": "none", "schedule": "solo"},
}


@pytest.mark.slow
def test_a_learner_learns_the_same_in_all_ways(tmp_path: Path) -> None:
    seen = {}
    for way, values in WAYS.items():
        drive(settings(**values), cell(tmp_path / way))
        controls = events(tmp_path / way, "control")
        assert {name: control["passed"] for name, control in controls.items()} == {
            "sharing-engaged": True,
            "base-unchanged": True,
            "mps": True,
            "page-cache": True,
        }
        series = {name: line["values"] for name, line in events(tmp_path / way, "series").items()}
        digests = {name: line["value"] for name, line in events(tmp_path / way, "digest").items()}
        seen[way] = (series, digests)
    assert all(learned == seen["solo"] for learned in seen.values())
    series, digests = seen["fork"]
    assert len(series) == 14
    assert all(len(values) == 3 for values in series.values())
    assert series["learner-0.loss"] != series["learner-1.loss"]
    assert set(digests) == {"base", "learner-0.adapter", "learner-1.adapter"}


def test_windows_overlap_and_adapters_are_there(tmp_path: Path) -> None:
    drive(settings(sharing="fork", page_cache="warm"), cell(tmp_path))
    state = events(tmp_path, "control")["page-cache"]
    assert (state["asked"], state["ran"], state["passed"]) == ("warm", {"resident": 1.0}, True)
    one, two = (events(tmp_path, "worker")[f"learner-{number}"] for number in (0, 1))
    assert max(one["start"], two["start"]) < min(one["end"], two["end"])
    # Real tokens of the steps after the barrier: the first step's are not in the window.
    tokens = events(tmp_path, "series")["learner-0.tokens"]["values"]
    assert one["work"] == sum(tokens[1:])
    assert (tmp_path / "work" / "learner-1" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("asked", "hold", "said"),
    [
        ("fork", "private", "learner 0 had a private copy of 100.0 % of the base"),
        ("none", "mapped", "learner 0 shared 100.0 % of a base that was to be its own"),
        ("none", "arena", "learner 0 shared 100.0 % of a base that was to be its own"),
    ],
)
def test_sharing_that_is_not_what_was_asked_fails_its_control(
    tmp_path: Path, asked: str, hold: Any, said: str
) -> None:
    drive(settings(sharing=asked), cell(tmp_path), hold=hold)
    control = events(tmp_path, "control")["sharing-engaged"]
    assert (control["asked"], control["passed"], control["reason"]) == (asked, False, said)
    assert control["ran"][0]["size_mib"] > 0


def test_learners_are_pinned_and_say_so(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    drive(settings(cpus=1), cell(tmp_path, cpus=[[cores[0]], [cores[-1]]]))
    said = environment(tmp_path)
    assert [said[f"learner-{number}"]["affinity"] for number in (0, 1)] == [[cores[0]], [cores[-1]]]
    assert [said[f"learner-{number}"]["threads"] for number in (0, 1)] == [1, 1]
    assert said["learner-0"]["unguarded"] is None


@pytest.fixture
def learner_pids(below: Below) -> Callable[[int], list[int]]:
    """The learners below a driver, in the order they were started, once both are there."""

    def found(driver: int) -> list[int]:
        while True:
            learners = below("learner_process", driver=driver) or below("processes.zygote", driver=driver)[1:]
            if len(learners) == 2:
                return [process.pid for process in learners]
            time.sleep(0.01)

    return found


@pytest.fixture
def while_running(learner_pids: Callable[[int], list[int]]) -> Callable[[Act], threading.Thread]:
    """Does something to the learners' pids as soon as they are there."""

    def started(act: Act) -> threading.Thread:
        thread = threading.Thread(target=lambda: act(learner_pids(os.getpid())), daemon=True)
        thread.start()
        return thread

    return started


@pytest.mark.parametrize("sharing", ["none", "fork"])
def test_a_killed_learner_fails_the_cell_by_name_and_leaves_nobody(
    tmp_path: Path, sharing: str, while_running: Callable[[Act], threading.Thread]
) -> None:
    before = set(psutil.Process().children(recursive=True))
    helper = while_running(lambda pids: os.kill(pids[1], signal.SIGKILL))
    with pytest.raises(MachineError, match=r"^learner 1: it was killed by SIGKILL"):
        drive(settings(sharing=sharing, steps=100_000), cell(tmp_path))
    helper.join()
    assert set(psutil.Process().children(recursive=True)) == before
    assert events(tmp_path, "metric") == {}


def test_a_killed_golden_process_ends_the_pool_by_name(
    tmp_path: Path, below: Below, while_running: Callable[[Act], threading.Thread]
) -> None:
    helper = while_running(lambda _: below("processes.golden")[0].kill())
    with pytest.raises(MachineError, match=r"^the golden process died \(SIGKILL\)"):
        drive(settings(sharing="fork", steps=100_000), cell(tmp_path))
    helper.join()


def test_a_learner_that_hangs_is_named_while_its_sibling_waits(
    tmp_path: Path, while_running: Callable[[Act], threading.Thread]
) -> None:
    helper = while_running(lambda pids: os.kill(pids[0], signal.SIGSTOP))
    with pytest.raises(MachineError, match=r"^learner 0: no sign of life for"):
        drive(settings(sharing="fork"), cell(tmp_path), patience=Patience(floor=1.5, factor=1.0))
    helper.join()


def test_a_learner_with_bad_data_is_named(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"prompt": "Say yes.", "chosen": " yes", "rejected": " no"}\n')
    bad.write_text('{"prompt": "Say yes."}\n')
    files = {"source": "files", "files": [str(good), str(bad)]}
    with pytest.raises(MachineError, match=r"^learner 1: .*bad\.jsonl line 1: 'chosen' is missing"):
        drive(settings(data=files), cell(tmp_path))


def test_a_learner_whose_loss_is_not_finite_ends_the_cell_as_nonfinite(tmp_path: Path) -> None:
    with pytest.raises(
        FloatingPointError, match=r"^learner \d: the (loss|gradient norm) is (nan|inf) at step"
    ):
        drive(settings(learning_rate=1e30, steps=5, warmup_steps=0), cell(tmp_path))
    # What was trained until then is on record.
    series = events(tmp_path, "series")
    assert any(
        line["values"][0] == pytest.approx(0.6931, abs=1e-3)
        for name, line in series.items()
        if "loss" in name
    )


def test_a_base_that_does_not_fit_is_out_of_memory(tmp_path: Path, tiny_base: Path) -> None:
    # A sparse file of 256 GiB with a sound header: nothing here can hold it, and the machine says so before it
    # tries.
    directory = tmp_path / "huge"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((tiny_base / name).read_bytes())
    from coresident.engines.pool.base.tensors import encode_header

    start = encode_header([("w", "float32", (1 << 36,))])
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(start)
        stream.truncate(len(start) + (4 << 36))
    with pytest.raises(MemoryError, match="an arena of"):
        drive(settings(base={"path": str(directory)}, sharing="fork"), cell(tmp_path / "fork"))


DRIVER = """
import json, sys
from pathlib import Path
from coresident.workload import Reporter, workload
pool = workload("pool.dpo")
assert "torch" not in sys.modules
place = Path(sys.argv[2])
cell = Reporter(events=place / "events", work=place / "work")
pool.run(pool.parameters.model_validate_json(sys.argv[1]), cell)
assert "torch" not in sys.modules, "the driver's memory is measured as the pool's"
"""


def test_the_driver_carries_no_torch(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", DRIVER, settings(learners=1).model_dump_json(), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sharing", ["none", "fork"])
def test_a_killed_driver_leaves_no_process_behind(
    tmp_path: Path, sharing: str, learner_pids: Callable[[int], list[int]]
) -> None:
    asked = settings(sharing=sharing, steps=100_000).model_dump_json()
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, asked, str(tmp_path)])
    learner_pids(driver.pid)
    below = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    _, alive = psutil.wait_procs(below, timeout=5)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
