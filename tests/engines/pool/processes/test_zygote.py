"""The zygote forks only while a fork of it is safe, and what it imports leaves it so."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from coresident.engines.pool.job import variables
from coresident.engines.pool.processes.zygote import untouched
from coresident.errors import InternalError


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=variables(1), capture_output=True, text=True, check=False
    )


def test_importing_everything_leaves_one_thread_and_no_device() -> None:
    done = run("from coresident.engines.pool.processes.zygote import *; import_all(); print(untouched())")
    assert done.stdout == "1\n", done.stderr


def test_building_the_model_leaves_it_so_even_where_kernels_may_have_threads(tiny_base: str) -> None:
    code = f"""
from pathlib import Path
from coresident.engines.pool.processes.zygote import *
from coresident.engines.pool.job import Job
from coresident.engines.pool.parameters import DPO
job = Job(parameters=DPO(), hold="arena", base={str(tiny_base)!r}, events="", work="", cpus=[])
import_all(); build(job, -1); print(untouched())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables(4), capture_output=True, text=True, check=False
    )
    assert done.stdout == "1\n", done.stderr


def test_a_process_that_computed_in_parallel_is_refused() -> None:
    code = "import torch; torch.set_num_threads(2); torch.ones(1 << 20).mul_(2)\n"
    done = run(code + "from coresident.engines.pool.processes.zygote import untouched; untouched()")
    assert "so a fork of it could hang" in done.stderr


def test_a_second_thread_is_refused() -> None:
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        with pytest.raises(InternalError, match="threads, so a fork of it could hang"):
            untouched()
    finally:
        stop.set()
        other.join()
