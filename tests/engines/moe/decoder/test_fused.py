"""The fused step, its kernels interpreted: what the plain step computes, and the same bits however few slots there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.moe import assemble
from coresident.engines.moe.parameters import Decode
from coresident.errors import UserError


@pytest.mark.slow
def test_the_fused_step_is_the_plain_step_whatever_is_resident(interpreted: Callable[..., Any]) -> None:
    told = interpreted(Path(__file__).with_name("interpreted.py"))
    assert [one["case"] for one in told] == ["olmoe q4", "qwen3_moe stored"]
    for one in told:
        assert one["plain"] < 1e-5 and one["alone"] < 1e-5, one
        assert one["few"], one
        whole, few, alone = one["installs"]
        assert whole == 0 and few > 0 and alone > 0, one
        assert one["filled_by"] == ["host", "host", "device"], one
        assert one["unattended"] and one["books"] == [[True] * 5], one


@pytest.mark.slow
def test_turns_of_host_and_kernels_leave_no_trace(interpreted: Callable[..., Any]) -> None:
    """Whoever brings experts in, and however they take turns: the same tokens, figures and books."""
    told = interpreted(Path(__file__).with_name("interpreted_turns.py"))
    assert told == {"by": ["host", "device", "device", "device", "device", "host"], "differ": []}


def test_fused_kernels_are_for_a_card() -> None:
    import torch

    asked = Decode.model_validate({"model": {"config": "tiny"}, "kernels": "fused"})
    with pytest.raises(UserError, match="fused kernels need a card"):
        assemble.build(asked, assemble.open_model(asked.model), torch.device("cpu"), 20, 1)


@pytest.mark.parametrize(("slots", "rows", "kernels"), [(None, 9, True), (7, 3, True), (7, 4, False)])
def test_kernels_fill_for_as_many_rows_as_the_slots_suffice(
    slots: int | None, rows: int, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experts a row, of 8: with a slot for each, which nothing fills beforehand, that is any number of rows."""
    pytest.importorskip("triton")
    import torch

    from coresident.engines.moe.decoder.fused import FusedDecoder

    monkeypatch.setattr(assemble, "_decoder_kind", lambda *_: FusedDecoder)
    asked = Decode.model_validate({"model": {"config": "tiny"}, "slots": slots, "preload": False})
    engine = assemble.build(asked, assemble.open_model(asked.model), torch.device("cpu"), 8, rows)
    assert (engine.origin.experts, engine.origin.architecture.top_k) == (8, 2)
    engine.decoder.warm(rows)
    assert (engine.decoder._programs[rows].unattended is not None) == kernels  # type: ignore[attr-defined]
    engine.close()
