"""What the sizes that are foretold are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from coresident.engines.pool.base import writer as float_writer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny shape as floats."""
    where = tmp_path_factory.mktemp("bases") / "tiny"
    float_writer.write("tiny", "float32", 0, where)
    return where


@pytest.fixture
def kept_by_autograd() -> Callable[[Callable[[], object], Iterable[torch.Tensor]], int]:
    """Bytes of all memory that the graph of a call holds, but for what is there anyway."""

    def measured(run: Callable[[], object], anyway: Iterable[torch.Tensor]) -> int:
        known = {tensor.untyped_storage().data_ptr() for tensor in anyway}
        kept: dict[int, int] = {}
        held: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known and tensor.is_floating_point():
                kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            run()
        return sum(kept.values())

    return measured
