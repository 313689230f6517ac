"""An exception in a pool process becomes a status and one sentence, whatever raised it."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from coresident.engines.pool.learning.learner import NonFinite
from coresident.engines.pool.processes.channel import Channel, pair
from coresident.engines.pool.processes.failure import classify, told
from coresident.errors import UserError


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (MemoryError(), "oom", "out of memory"),
        (MemoryError("a private base of 9 bytes"), "oom", "a private base of 9 bytes"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "oom", "can't allocate memory"),
        (NonFinite("the loss is nan at step 2"), "nonfinite", "the loss is nan at step 2"),
        (UserError("a.jsonl line 2: bad", "mend it"), "failed", "a.jsonl line 2: bad; mend it"),
        (RuntimeError("first\nsecond"), "failed", "RuntimeError: first second"),
        (KeyError("x"), "failed", "KeyError: 'x'"),
    ],
)
def test_classes(error: BaseException, status: str, said: str) -> None:
    found = classify(error)
    assert found[0] == status
    assert said in found[1]


def test_it_is_told_before_the_process_ends(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = pair()
    with pytest.raises(SystemExit) as ended, told(Channel(theirs)):
        raise ValueError("x" * 100_000)
    assert ended.value.code == 1
    heard = ours.hear()
    assert (heard["event"], heard["status"]) == ("failed", "failed")
    assert heard["reason"].startswith("ValueError: xxx")
    assert "Traceback" in capfd.readouterr().err


def test_it_is_told_where_the_log_cannot_be_written() -> None:
    ours, theirs = pair()
    code = f"""
import sys
from coresident.engines.pool.processes.channel import Channel
from coresident.engines.pool.processes.failure import leave, told
sys.stderr = open("/dev/full", "w")
try:
    with told(Channel.inherited({theirs.fileno()})):
        raise OSError(28, "No space left on device")
except SystemExit:
    leave(3)
"""
    done = subprocess.run([sys.executable, "-c", code], pass_fds=[theirs.fileno()], check=False, timeout=60)
    assert done.returncode == 3
    heard = ours.hear()
    assert "No space left on device" in heard["reason"]
    assert "free space" in heard["remedy"] and "--resume" in heard["remedy"]


def test_a_compilers_workers_are_gone_when_the_process_is() -> None:
    script = """
import psutil
import torch._inductor.config as config
config.compile_threads, config.worker_start_method = 2, "subprocess"
from torch._inductor.async_compile import AsyncCompile
from coresident.engines.pool.processes.failure import leave
AsyncCompile.process_pool()
print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
leave(0)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    workers = [int(pid) for pid in ended.stdout.split()]
    assert workers
    assert not [pid for pid in workers if psutil.pid_exists(pid)]
