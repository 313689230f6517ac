"""SIGKILL at ten random moments, then on: the same samples, losses and weights as if nothing had happened."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.pretrain.directory import METRICS, lines
from coresident.engines.pretrain.parameters import Train
from coresident.text.cache import TokenCache
from coresident.text.prepare import Prepare, prepare

UPDATES = 130
# Imports once and forks for each training, which then starts at once and can be killed alone.
STARTER = """
import json, os, sys
from pathlib import Path
import torch._dynamo, torch.distributed.tensor  # which an optimiser's first step would import
from coresident.engines.pretrain import commands, training
from coresident.engines.pretrain.parameters import Train
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        parameters = Train.model_validate_json(json.dumps(asked["parameters"]))
        quiet = lambda _: None
        commands.train(parameters, Path(asked["out"]), "cpu", asked["resume"], quiet, quiet)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., int]]:
    """Starts a training and returns its process; `ended` reads its exit status."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def started(asked: Train, out: Path, resume: bool) -> int:
            told = {"parameters": asked.model_dump(mode="json"), "out": str(out), "resume": resume}
            stdin.write(json.dumps(told) + "\n")
            stdin.flush()
            return int(stdout.readline())

        started.ended = lambda: int(stdout.readline())  # type: ignore[attr-defined]
        yield started
        stdin.close()


@pytest.fixture(scope="module")
def twin(cache: TokenCache, tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    """The same text, prepared by two processes instead of one."""
    source = cache.path.parent
    from coresident.text.corpus import CorpusSource

    text = CorpusSource(
        kind="files",
        files={"prose": (str(source / "prose"),), "code": (str(source / "code"),)},
        validation_share=0.1,
    )
    return prepare(Prepare(source=text, vocabulary=300), tmp_path_factory.mktemp("twin") / "cache", workers=2)


def reached(out: Path) -> int:
    """The last update that the metrics tell of."""
    rows = lines(out / METRICS)
    return max((row["update"] for row in rows), default=0)


def test_ten_kills_change_nothing(
    settings: Callable[..., Train], start: Any, cache: TokenCache, twin: TokenCache, tmp_path: Path
) -> None:
    changed = {
        "budget": {"targets": 64 * UPDATES, "virtual_epochs": 7},
        "checkpoints": {"policy": "interval", "every": 4},
    }
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start(settings(**changed), whole, False)
    assert start.ended() == 0
    source = random.Random(0)
    moments = sorted(source.sample(range(1, UPDATES - 20), 10))
    for number, moment in enumerate(moments):
        # Prefetched or not, from the one cache or its twin, fetched in windows of another size.
        asked = settings(
            **changed,
            runtime__prefetch=number % 2 == 0,
            runtime__log_every=1 + number % 3,
            data={"cache_dir": str((cache if number % 2 else twin).path)},
        )
        child = start(asked, killed, resume=(killed / "run.json").is_file())
        until = time.monotonic() + 60
        while reached(killed) < moment and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(source.random() * 0.02)
        subprocess.run(["kill", "-KILL", str(child)], check=True)
        assert start.ended() == -9
        assert not (killed / "result.json").exists()
    start(settings(**changed), killed, True)
    assert start.ended() == 0

    one, other = (json.loads((place / "result.json").read_text()) for place in (whole, killed))
    assert one["weights"] == other["weights"]
    assert one["validation"] == other["validation"]
    # Times and windows apart, every row is there, once, with the same samples, loss and gradient.
    told, again = (
        [row for row in lines(place / METRICS) if "window" not in row] for place in (whole, killed)
    )
    assert told == again
    assert [row["update"] for row in told if "loss" in row] == list(range(1, one["updates"] + 1))
    assert len({row["samples"] for row in told if "loss" in row}) == one["updates"]
    windows = [row for row in lines(killed / METRICS) if "window" in row]
    assert sum(row["window"] for row in windows) == one["updates"]
    shutil.rmtree(killed)
