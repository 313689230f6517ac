"""The fused step, its kernels interpreted: what the plain step computes, and the same bits however few slots there are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
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


@pytest.mark.slow
def test_scores_that_are_no_numbers_choose_experts_that_there_are(interpreted: Callable[..., Any]) -> None:
    """An expert beyond the last would be read where there is none; so the logits tell, as those of plain operations do."""
    told = interpreted(Path(__file__).with_name("interpreted_route.py"))
    for one in told["routed"]:
        assert one["numbers"] == 0, one
        assert one["chosen"][0] >= 0 and one["chosen"][1] < one["experts"], one
        assert one["ties"] == [1, 2] and one["last"] and one["weights"] < 1e-6, one
    assert all("scores a token as no finite number" in said for said in told["said"]), told["said"]


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


def test_a_warm_up_that_fails_is_over_before_residency_is_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first kernels run on a stream of their own, and what they chose must not count."""
    pytest.importorskip("triton")
    import torch

    from coresident.engines.moe.decoder.fused import FusedDecoder

    order: list[str] = []

    class Side:
        """A stream whose kernels are still to run."""

        def __init__(self, device: Any) -> None:
            pass

        def wait_stream(self, other: Any) -> None:
            pass

        def synchronize(self) -> None:
            order.append("over")

    def refused() -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(assemble, "_decoder_kind", lambda *_: FusedDecoder)
    asked = Decode.model_validate({"model": {"config": "tiny"}, "slots": 3})
    engine = assemble.build(asked, assemble.open_model(asked.model), torch.device("cpu"), 8, 1)
    monkeypatch.setattr(torch.cuda, "Stream", Side)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    program = SimpleNamespace(
        unattended=SimpleNamespace(sleep=lambda: order.append("asleep"), wake=lambda: order.append("awake")),
        segments=[SimpleNamespace(run=refused)],
    )
    with pytest.raises(torch.OutOfMemoryError):
        engine.decoder._capture(program)  # type: ignore[attr-defined]
    assert order == ["asleep", "over", "awake"]
    engine.close()


def test_a_step_without_a_prompt_is_refused_as_the_plain_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import torch

    from coresident.engines.moe.decoder.decoder import Decoder
    from coresident.engines.moe.decoder.fused import FusedDecoder

    asked = Decode.model_validate({"model": {"config": "tiny"}, "slots": 3})
    for kind in (Decoder, FusedDecoder):
        monkeypatch.setattr(assemble, "_decoder_kind", lambda *_, kind=kind: kind)
        engine = assemble.build(asked, assemble.open_model(asked.model), torch.device("cpu"), 8, 1)
        with pytest.raises(UserError, match="no prompt was read"):
            engine.decoder.step(torch.tensor([1]))
        engine.close()
