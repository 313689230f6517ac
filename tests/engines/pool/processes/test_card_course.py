"""The course of a pool on a card, with the card stood in for by the CPU's memory: which process does what, in
which order, and what is said when one of them dies. What only a card can show is in test_gpu_pool.py.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from coresident.engines.pool.base import base
from coresident.engines.pool.card.card import Memory
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.run import drive
from coresident.errors import MachineError
from coresident.workload import Reporter

# In every pool process: the card is the CPU, an exported allocation is a file in shared memory, and a learner's own
# allocations are those that are not such a file.
STAND_IN = """
import importlib.abc, importlib.util, os, sys

def device(module):
    import torch
    module.start = lambda dtype: torch.device("cpu")
    module.under_mps = lambda: False
    def copied(block):
        return module.Block(block.memory.clone(), block.plan, mapped=False)
    module.copied = copied

def ipc(module):
    import torch
    def export(memory):
        path = os.environ["STAND_IN"] + "/base"
        if not os.path.exists(path):
            open(path, "wb").write(memory.numpy().tobytes())
        return {"path": path, "counter": os.urandom(4).hex()}
    def attach(told, size):
        counter = os.environ["STAND_IN"] + "/" + told["counter"]
        os.close(os.open(counter, os.O_CREAT | os.O_EXCL))  # good for one consumer
        module.attached = torch.from_file(told["path"], shared=True, size=size, dtype=torch.uint8)
        return module.attached
    module.export, module.attach = export, attach

def device_sharing(module):
    def held(tensors):
        from coresident.engines.pool.sharing import ipc
        base = getattr(ipc, "attached", None)
        low, high = (base.data_ptr(), base.data_ptr() + base.numel()) if base is not None else (0, 0)
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        mapped = sum(t.numel() * t.element_size() for t in tensors.values() if low <= t.data_ptr() < high)
        return module.DeviceHeld(size, size - mapped, mapped, size, size)
    module.held = held

ROOMS = {device: "card", ipc: "sharing", device_sharing: "sharing"}
WANTED = {f"coresident.engines.pool.{room}.{f.__name__}": f for f, room in ROOMS.items()}

class StandIn(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in WANTED:
            return None
        change = WANTED.pop(name)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def changed(module):
            run(module)
            change(module)
        spec.loader.exec_module = changed
        return spec

sys.meta_path.insert(0, StandIn())
"""


@pytest.fixture(scope="module", autouse=True)
def _stood_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place = tmp_path_factory.mktemp("stand-in")
    (place / "sitecustomize.py").write_text(STAND_IN)
    known = os.environ.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(base.CACHE, str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(place), known))))
        yield


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("STAND_IN", str(tmp_path / "shared"))
    monkeypatch.setattr(
        "coresident.engines.pool.processes.course.reader", lambda _: lambda: Memory(1 << 40, 1 << 30)
    )
    return tmp_path


def settings(**values: Any) -> DPO:
    given = {"base": {"config": "tiny"}, "learners": 2, "steps": 3, "max_length": 48, "data": {"pairs": 8}}
    return DPO.model_validate(given | values)


def cell(place: Path) -> Reporter:
    return Reporter(events=place / "events", work=place / "work", device="GPU-1")


def events(place: Path, kind: str) -> dict[str, Any]:
    files = (place / "events").iterdir()
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {line.get("name", line.get("id")): line for line in lines if line["event"] == kind}


@pytest.mark.parametrize(
    ("sharing", "schedule"), [("none", "together"), ("fork", "together"), ("fork-copy", "solo")]
)
def test_every_way_of_holding_runs_to_its_end_with_its_controls(
    place: Path, sharing: str, schedule: str
) -> None:
    drive(settings(sharing=sharing, schedule=schedule), cell(place))
    controls = {name: (line["passed"], line["reason"]) for name, line in events(place, "control").items()}
    assert {passed for passed, _ in controls.values()} == {True}, controls
    metrics = events(place, "metric")
    assert ("golden_to_first_step_seconds" in metrics) == (sharing != "none")
    assert metrics["learners_done"]["value"] == 2
    counters = len(list((place / "shared").iterdir()))
    assert counters == (0 if sharing == "none" else 3)


def test_a_killed_golden_process_ends_the_pool_by_name(
    place: Path, below: Callable[..., list[psutil.Process]]
) -> None:
    before = psutil.Process().children(recursive=True)

    def kill() -> None:
        # The zygote, the golden process, and two learners.
        while len(found := below("processes.zygote")) < 4:
            time.sleep(0.01)
        found[1].kill()

    helper = threading.Thread(target=kill, daemon=True)
    helper.start()
    with pytest.raises(MachineError, match=r"^the golden process died \(SIGKILL\)"):
        drive(settings(sharing="fork", steps=100_000), cell(place))
    helper.join()
    assert psutil.Process().children(recursive=True) == before


def test_a_peak_above_the_budget_ends_the_pool_as_out_of_memory(
    place: Path, monkeypatch: pytest.MonkeyPatch, below: Callable[..., list[psutil.Process]]
) -> None:
    before = psutil.Process().children(recursive=True)

    def used() -> Memory:  # much, as soon as both learners are there
        return Memory(1 << 40, (90 if len(below("processes.zygote")) >= 4 else 1) << 30)

    monkeypatch.setattr("coresident.engines.pool.processes.course.reader", lambda _: used)
    with pytest.raises(
        MemoryError, match=r"reached 90\.00 GiB, above the budget device_memory of 80\.00 GiB"
    ):
        drive(settings(sharing="fork", device_memory="80GiB"), cell(place))
    assert psutil.Process().children(recursive=True) == before
