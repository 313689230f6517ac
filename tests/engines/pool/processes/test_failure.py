"""An exception in a pool process becomes a status and one sentence, whatever raised it."""

from __future__ import annotations

import pytest
import torch

from coresident.engines.pool.learning.learner import NonFinite
from coresident.engines.pool.processes.channel import Channel, pair
from coresident.engines.pool.processes.failure import classify, told
from coresident.errors import UserError


def _torch_has_no_memory() -> BaseException:
    try:
        torch.empty(1 << 49, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("512 TiB, more than there are addresses for, were there")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (MemoryError(), "oom", "out of memory"),
        (MemoryError("a private base of 9 bytes"), "oom", "a private base of 9 bytes"),
        (_torch_has_no_memory(), "oom", "can't allocate memory"),
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
