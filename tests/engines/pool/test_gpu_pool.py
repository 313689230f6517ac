"""Whole pools on a card: one base attached by all, the same learning however it is held, and every failure named
with nothing left behind.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from coresident.engines.pool.base import base
from coresident.engines.pool.card.card import reader
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.run import drive
from coresident.errors import MachineError
from coresident.workload import Reporter

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MIB = 2**20
Below = Callable[..., list[psutil.Process]]
WAYS: dict[str, dict[str, Any]] = {
    "copy": {"sharing": "none"},
    "fork": {"sharing": "fork"},
    "fork-copy": {"sharing": "fork-copy"},
    "solo": {"sharing": "none", "schedule": "solo"},
    "fork-mps": {"sharing": "fork", "mps": "on"},
}
# What is asked, and how the base is really held.
LIES = {"claims-to-share": ("fork", "private"), "claims-its-own": ("none", "arena")}


# Makes every learner of the pool "rogue" write into its base in its second step.
ROGUE = """
import importlib.abc, importlib.util, sys

class Rogue(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "coresident.engines.pool.learning.learner" or "/rogue/" not in "".join(sys.argv):
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def patched(module):
            run(module)
            step = module.Learner.step
            def rogue(self):
                if self.steps == 1:
                    frozen = next(value for value in self.model.parameters() if not value.requires_grad)
                    frozen.data.view(-1)[-1] += 1
                return step(self)
            module.Learner.step = rogue
        spec.loader.exec_module = patched
        return spec

sys.meta_path.insert(0, Rogue())
"""


def settings(**values: Any) -> DPO:
    given = {
        "base": {"config": "tiny"},
        "learners": 2,
        "steps": 4,
        "max_length": 64,
        "data": {"pairs": 8},
        "deterministic": True,
    }
    return DPO.model_validate(given | values)


def cell(place: Path, card: str) -> Reporter:
    return Reporter(events=place / "events", work=place / "work", device=card)


def events(place: Path, kind: str) -> dict[str, Any]:
    lines = [
        json.loads(line) for file in (place / "events").iterdir() for line in file.read_text().splitlines()
    ]
    return {line.get("name", line.get("id")): line for line in lines if line["event"] == kind}


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(base.CACHE, str(tmp_path_factory.mktemp("cache")))
        base.ensure(settings().base, "float32")
        place = tmp_path_factory.mktemp("rogue")
        (place / "sitecustomize.py").write_text(ROGUE)
        known = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(place), known))))
        yield


@pytest.fixture(scope="module")
def pools(card: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each way's events lie. All run at the same time, on the one card: they must not disturb each other."""
    root = tmp_path_factory.mktemp("pools")

    def one(name: str) -> tuple[str, Path]:
        asked, hold = LIES.get(name, (None, None))
        values = WAYS.get(name, {"sharing": "fork"}) if asked is None else {"sharing": asked}
        drive(settings(**values), cell(root / name, card), hold=hold)  # type: ignore[arg-type]
        return name, root / name

    names = [*WAYS, *LIES, "rogue"]
    with ThreadPoolExecutor(len(names)) as threads:
        return dict(threads.map(one, names))


def learned(place: Path) -> tuple[dict[str, Any], dict[str, str]]:
    series = {name: line["values"] for name, line in events(place, "series").items()}
    return series, {name: line["value"] for name, line in events(place, "digest").items()}


@pytest.mark.parametrize("way", [way for way in WAYS if way != "solo"])
def test_a_pool_learner_learns_bit_for_bit_what_it_learns_alone(pools: dict[str, Path], way: str) -> None:
    series, digests = learned(pools["solo"])
    assert len(digests) == 3
    assert all(len(values) == 4 for values in series.values())
    assert learned(pools[way]) == (series, digests)


@pytest.mark.parametrize("way", WAYS)
def test_every_control_passes(pools: dict[str, Path], way: str) -> None:
    controls = {
        name: (line["passed"], line["reason"]) for name, line in events(pools[way], "control").items()
    }
    assert set(controls) == {"sharing-engaged", "base-unchanged", "mps", "page-cache"}
    assert {passed for passed, _ in controls.values()} == {True}, controls


def test_attached_learners_hold_nothing_of_the_base_themselves(pools: dict[str, Path]) -> None:
    for way, share in (("fork", 0), ("fork-mps", 0), ("fork-copy", 1), ("copy", 1)):
        for one in events(pools[way], "control")["sharing-engaged"]["ran"]["learners"]:
            assert one["private_mib"] == pytest.approx(share * one["size_mib"])
            assert one["mapped_mib"] == pytest.approx((1 - share) * one["size_mib"])


def test_mps_is_read_back_from_every_process(pools: dict[str, Path]) -> None:
    ran = events(pools["fork-mps"], "control")["mps"]["ran"]
    assert ran["processes"] == {"learner 0": True, "learner 1": True, "golden": True}
    assert ran["clients"] in (None, 3)
    ran = events(pools["fork"], "control")["mps"]["ran"]
    assert set(ran["processes"].values()) == {False}


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ("claims-to-share", "learner 0 had a private copy of 100.0 % of the base"),
        ("claims-its-own", "learner 0 shared 100.0 % of a base that was to be its own"),
    ],
)
def test_sharing_that_is_not_what_was_asked_fails_its_control(
    pools: dict[str, Path], lie: str, said: str
) -> None:
    control = events(pools[lie], "control")["sharing-engaged"]
    assert (control["passed"], control["reason"]) == (False, said)
    assert control["ran"]["card"]["marginal_mib"] is not None


def test_a_write_into_the_shared_base_is_caught(pools: dict[str, Path]) -> None:
    control = events(pools["rogue"], "control")["base-unchanged"]
    assert (control["passed"], control["reason"]) == (False, "learner 0's base changed while it trained")
    assert len(control["ran"]) > 1


def killed(job: str, which: int, place: Path, card: str, below: Below) -> str:
    """What a pool says whose zygote (0), golden process (1) or learner (2, 3) is killed while it trains."""

    def kill() -> None:
        while len(found := below("processes.zygote", f"/{job}/")) < 4:
            time.sleep(0.02)
        time.sleep(4.0)
        found[which].kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(MachineError) as caught:
        drive(settings(sharing="fork", steps=100_000), cell(place / job, card))
    thread.join()
    return str(caught.value)


def idle(read: Callable[[], Any], was: int) -> int:
    """The card's memory in use once it is back, or after three seconds."""
    for _ in range(60):
        if (used := read().used) <= was + 16 * MIB:
            break
        time.sleep(0.05)
    return int(used)


def test_whoever_is_killed_is_named_nothing_leaks_and_the_next_pool_runs(
    card: str, tmp_path: Path, below: Below
) -> None:
    read = reader(card)
    was, children = read().used, set(psutil.Process().children(recursive=True))
    with ThreadPoolExecutor(2) as threads:
        learner = threads.submit(killed, "one-learner", 3, tmp_path, card, below)
        golden = threads.submit(killed, "the-golden", 1, tmp_path, card, below)
    assert learner.result().startswith("learner 1: it was killed by SIGKILL")
    assert golden.result().startswith("the golden process died (SIGKILL)")
    assert idle(read, was) <= was + 16 * MIB
    assert set(psutil.Process().children(recursive=True)) <= children
    drive(settings(sharing="fork"), cell(tmp_path / "next", card))
    assert all(line["passed"] for line in events(tmp_path / "next", "control").values())
    assert idle(read, was) <= was + 16 * MIB
    assert not list(Path("/dev/shm").glob("torch_*"))


def test_a_peak_above_the_budget_is_out_of_memory_with_the_figure(card: str, tmp_path: Path) -> None:
    # Room for what is known beforehand, a context's lower bound, and not for a real one.
    budget = reader(card)().used // MIB + 230
    with pytest.raises(
        MemoryError, match=r"device's memory in use reached .* above the budget device_memory"
    ):
        drive(settings(sharing="none", learners=1, device_memory=f"{budget}MiB"), cell(tmp_path, card))
