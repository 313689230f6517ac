"""In the backward pass every dequantised weight is put where the last one was; what is learned is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.base import base, loading
from coresident.engines.pool.base import writer as float_writer
from coresident.engines.pool.learning import model as models
from coresident.engines.pool.learning.learner import Learner
from coresident.engines.pool.learning.tokenized import Batch
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.quantised import kernel, nf4, writer
from coresident.engines.pool.quantised.nf4 import Quantised
from coresident.engines.pool.quantised.room import Room


def test_weights_lie_in_one_place_only_while_it_is_open() -> None:
    room, device = Room(32), torch.device("cpu")
    assert room.place((4, 8), torch.float32, device).shape == (4, 8)
    with room.opened():
        first, second = (room.place(shape, torch.float32, device) for shape in ((4, 8), (2, 3)))
        assert first.data_ptr() == second.data_ptr()
        assert second.shape == (2, 3)
        assert second.is_contiguous()
    third = room.place((4, 8), torch.float32, device)
    assert third.data_ptr() != first.data_ptr()
    assert third.untyped_storage().nbytes() == 32 * 4


def test_it_is_closed_whatever_happens() -> None:
    room = Room(4)
    with pytest.raises(RuntimeError), room.opened():
        room.place((4,), torch.float32, torch.device("cpu"))
        raise RuntimeError
    assert room._memory is None
    assert not room._open


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_learner_learns_the_same_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    float_writer.write("tiny", "float32", 0, tmp_path / "none")
    writer.write_from(tmp_path / "none", tmp_path / "nf4")
    settings = DPO.model_validate({"dtype": "float32", "checkpointing": checkpointing})
    ids = torch.randint(0, 500, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = Batch(
        ids, torch.ones_like(ids), torch.ones_like(ids), torch.arange(16), ids.flatten()[:16], ids.numel()
    )

    def learned() -> dict[str, list[float]]:
        model: Any = models.build_on_meta(tmp_path / "nf4", settings)
        models.attach(model, loading.private(base.read(tmp_path / "nf4"), "float32"), settings)
        learner = Learner(model, [batch] * 3, settings)
        for _ in range(3):
            learner.step()
        return learner.series

    plain = learned()
    places: dict[bool, list[int]] = {True: [], False: []}

    # As the kernel does on a card.
    def prepared(held: Quantised, dtype: torch.dtype, room: Room) -> Callable[[], torch.Tensor]:
        def dequantise() -> torch.Tensor:
            out = room.place(held.form.shape, dtype, held.weight.device).copy_(nf4.dequantise(held, dtype))
            places[room._open].append(out.data_ptr())
            return out

        return dequantise

    monkeypatch.setattr(kernel, "serves", lambda held, dtype: True)
    monkeypatch.setattr(kernel, "prepared", prepared)
    assert learned() == plain
    # Three backward passes: two layers of seven, but for the inputs of three of the first, which nothing is learned of.
    assert len(places[True]) == 3 * (11 + 14 * checkpointing)
    assert len(set(places[True])) <= 3
    assert len(places[False]) == 3 * 14 * 2
