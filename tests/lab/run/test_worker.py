"""The worker as the lab starts it: a real interpreter, a workload found by its entry point, real failures."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coresident.lab.run.process.supervise import Outcome
from coresident.lab.run.reported.events import Observed, read
from coresident.lab.run.status import conclude

MODULE = """
    import os, sys
    from coresident.errors import MachineError, UserError
    from coresident.workload import Parameters, Workload
    from pydantic import Field

    class Given(Parameters):
        code: str
        layers: tuple[str, ...] = Field(default=(), strict=False)
        steps: int = 1

    def run(parameters, cell):
        exec(parameters.code)

    workload = Workload("sample", "runs code", Given, (), frozenset(), run)
"""

Run = Callable[..., tuple[int, Observed, str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the worker on a workload that executes given code: (exit code, what was reported, stderr)."""
    package = tmp_path / "site"
    information = package / "sample-1.0.dist-info"
    information.mkdir(parents=True)
    (package / "sample_workload.py").write_text(textwrap.dedent(MODULE))
    registered = "[coresident.workloads]\nsample = sample_workload:workload\n"
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: sample\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(registered)

    runs = itertools.count()

    def started(code: str, name: str = "sample", **parameters: Any) -> tuple[int, Observed, str]:
        events = tmp_path / f"events{next(runs)}"
        given = {"code": textwrap.dedent(code), **parameters}
        described = {"cell": {"workload": name, "parameters": given}, "device": "cpu", "cpus": []}
        (tmp_path / "cell.json").write_text(json.dumps(described))
        environment = {
            **os.environ,
            "PYTHONPATH": str(package),
            "CORESIDENT_EVENTS": str(events),
            "CORESIDENT_CELL": str(tmp_path / "cell.json"),
            "CORESIDENT_WORK": str(tmp_path),
        }
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "coresident.lab.run.worker"],
            env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        return done.returncode, read(events, began), done.stderr

    return started


def test_a_workload_that_returns_is_done(run: Run) -> None:
    code, observed, _ = run("cell.metric('speed', parameters.steps, '1/s')", steps=7)
    assert (code, observed.done, observed.failed, observed.faults) == (0, True, None, [])
    assert observed.metrics["speed"].value == 7


def test_parameters_come_as_json_and_are_not_converted_otherwise(run: Run) -> None:
    _, observed, _ = run("cell.metric('n', len(parameters.layers), '')", layers=["a", "b"])
    assert observed.metrics["n"].value == 2
    code, observed, _ = run("", steps="7")
    assert code == 1 and not observed.done
    assert observed.failed is not None and "sample: parameter 'steps': " in observed.failed[1]


def test_an_unknown_workload_has_failed_and_the_nearest_is_named(run: Run) -> None:
    code, observed, _ = run("", name="sampel")
    assert code == 1 and observed.failed is not None
    assert observed.failed == ("failed", "unknown workload 'sampel'; did you mean 'sample'?")


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("raise MemoryError", "oom", "MemoryError"),
        ("x = bytearray(1 << 62)", "oom", "MemoryError"),
        (
            "import errno; raise OSError(errno.ENOMEM, 'Cannot allocate memory')",
            "oom",
            "Cannot allocate memory",
        ),
        ("raise RuntimeError('DefaultCPUAllocator: can\\'t allocate memory: you tried')", "oom", "you tried"),
        ("raise FloatingPointError('loss is nan at step 3')", "nonfinite", "loss is nan at step 3"),
        (
            "raise UserError('no pairs in data.jsonl', 'add some')",
            "failed",
            "no pairs in data.jsonl; add some",
        ),
        ("raise MachineError('the disk is full', 'free some')", "failed", "the disk is full; free some"),
        ("raise KeyError('loss')", "failed", "KeyError: 'loss' (<string> line 1)"),
        ("sys.exit(0)", "failed", "ended its process (exit code 0) instead of returning"),
        ("raise KeyboardInterrupt", "failed", "interrupted"),
        ("cell.metric('speed', float('nan'), '')", "failed", "not a finite number"),
    ],
)
def test_an_exception_ends_as_a_status_with_one_sentence(
    run: Run, code: str, status: str, words: str
) -> None:
    exit_code, observed, stderr = run(code)
    assert exit_code != 0 and not observed.done
    assert observed.failed is not None
    assert observed.failed[0] == status and words in observed.failed[1] and "\n" not in observed.failed[1]
    assert conclude(Outcome(exit_code=exit_code), observed) == observed.failed
    assert "interrupted" in words or "Traceback" in stderr


def test_a_failure_of_torch_for_want_of_memory_is_oom(run: Run) -> None:
    # A stand-in of the name: what counts is the type that the module of that name has.
    fake = """
        import types
        torch = sys.modules["torch"] = types.ModuleType("torch")
        class OutOfMemoryError(RuntimeError): pass
        torch.OutOfMemoryError = OutOfMemoryError
        raise OutOfMemoryError("CUDA out of memory")
    """
    assert run(fake)[1].failed == ("oom", "OutOfMemoryError: CUDA out of memory")


def test_exiting_behind_our_back_is_not_done(run: Run) -> None:
    code, observed, _ = run("cell.metric('speed', 1, ''); os._exit(0)")
    assert (code, observed.done) == (0, False)
    assert conclude(Outcome(exit_code=code), observed)[0] == "failed"


@pytest.mark.parametrize("how", ["return", "raise ValueError('in the child')"])
def test_a_forked_process_never_reports_done_for_the_whole(run: Run, how: str) -> None:
    code, observed, _ = run(
        f"""
        def work():
            if os.fork() == 0:
                {how}
                return
            os.wait()
            os._exit(9)
        work()
        """
    )
    assert (code, observed.done) == (9, False)
    assert observed.failed is not None
    assert ("in the child" if "raise" in how else "a forked process returned") in observed.failed[1]


def test_the_interpreter_that_did_the_work_is_described(run: Run) -> None:
    _, observed, _ = run("import numpy")
    told = observed.environment
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["affinity"] == sorted(os.sched_getaffinity(0))
    assert told["argv"][-2:] == ["-m", "coresident.lab.run.worker"]
    assert told["hostname"] and told["numpy"]
    assert "torch" not in told, "reported only what the workload has imported"


def test_the_threads_that_torch_computes_with_are_told(run: Run) -> None:
    fake = """
        import types
        torch = sys.modules["torch"] = types.ModuleType("torch")
        torch.__version__, torch.get_num_threads, torch.get_num_interop_threads = "2.99", lambda: 3, lambda: 4
    """
    told = run(fake)[1].environment
    assert (told["torch"], told["torch_threads"], told["torch_interop_threads"]) == ("2.99", 3, 4)


def test_outside_of_a_cell_it_says_so() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CORESIDENT_")}
    done = subprocess.run(
        [sys.executable, "-m", "coresident.lab.run.worker"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "this process runs in no cell" in done.stderr and "Traceback" not in done.stderr


def test_it_imports_neither_the_lab_nor_anything_heavy() -> None:
    code = "import sys, coresident.lab.run.worker; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"torch", "transformers", "numpy", "pandas", "duckdb", "scipy", "rich", "typer", "ruamel"}
    assert not heavy & set(loaded)
    assert [name for name in loaded if name.startswith("coresident.lab.")] in (
        ["coresident.lab.run", "coresident.lab.run.worker"],
    )
