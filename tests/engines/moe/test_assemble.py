"""A decoder that cannot be put together gives back what was opened for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.moe import assemble
from coresident.engines.moe.parameters import Decode
from coresident.engines.moe.tiers.disk import DiskFile
from coresident.engines.moe.tiers.host import Arena, Staged
from coresident.engines.moe.tiers.readers import RecordReader
from coresident.errors import UserError


@pytest.mark.parametrize("tier", ["pinned", "disk"])
def test_what_fails_after_host_memory_was_had_gives_it_back(
    tier: str, saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory that is forgotten stays pinned: it cannot be had again."""
    monkeypatch.setenv("CORESIDENT_CACHE", str(tmp_path / "cache"))
    closed: list[str] = []
    for kind in (Arena, Staged, DiskFile):
        close = kind.close

        def told(self: Any, close: Callable[[Any], None] = close) -> None:
            closed.append(type(self).__name__)
            close(self)

        monkeypatch.setattr(kind, "close", told)
    asked = Decode.model_validate(
        {"model": {"path": str(saved("olmoe"))}, "slots": 2, "tier": tier, "kernels": "fused"}
    )
    with pytest.raises(UserError, match="fused kernels need a card"):
        assemble.build(asked, assemble.open_model(asked.model), torch.device("cpu"), 20, 1)
    assert closed == (["Arena"] if tier == "pinned" else ["Staged", "DiskFile"])


def test_a_bad_ranking_is_told_before_experts_are_read(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large model that takes minutes."""
    file = tmp_path / "popular.json"
    file.write_text("[[1, 2]]")
    asked = Decode.model_validate(
        {"model": {"path": str(saved("olmoe"))}, "policy": "static", "popularity": str(file)}
    )
    monkeypatch.setattr(assemble, "reader_of", lambda *_: pytest.fail("experts are read"))
    with pytest.raises(UserError, match="popularity is not one number"):
        assemble.build(asked, assemble.open_model(asked.model), torch.device("cpu"), 20, 1)


def test_a_reader_s_files_are_closed_where_there_is_no_host_memory(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORESIDENT_CACHE", str(tmp_path / "cache"))
    opened: list[int] = []
    start = RecordReader.__post_init__

    def kept(self: RecordReader) -> None:
        start(self)
        opened.extend(file.descriptor for file in self.files)

    monkeypatch.setattr(RecordReader, "__post_init__", kept)
    model = {"path": str(saved("olmoe"))}
    asked = Decode.model_validate({"model": model, "slots": 2, "tier": "disk", "host_memory": "1KiB"})
    with pytest.raises(UserError, match="does not hold two experts"):
        assemble.build(asked, assemble.open_model(asked.model), torch.device("cpu"), 20, 1)
    assert len(opened) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
