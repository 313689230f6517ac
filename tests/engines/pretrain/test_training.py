"""A training as a whole: it learns, is kept as asked, goes on exactly, and ends as what it is."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pretrain import checkpoints, evaluation, feed, training
from coresident.engines.pretrain.directory import METRICS, RESULT, lines
from coresident.engines.pretrain.parameters import Train
from coresident.engines.pretrain.recorder import Recorder
from coresident.engines.pretrain.update import Losses
from coresident.errors import MachineError, UserError
from coresident.model import flops
from coresident.text.cache import TokenCache
from coresident.text.order import Order

Run = Callable[..., dict[str, Any]]
Settings = Callable[..., Train]


def told(out: Path) -> list[dict[str, Any]]:
    """What is the same in every training of one recipe: the rows without their times."""
    return [row for row in lines(out / METRICS) if "window" not in row]


def stop_after(monkeypatch: pytest.MonkeyPatch, update: int) -> None:
    """Ask the training to stop, as a signal would, when so many updates are ordered."""
    add = Recorder.add

    def adding(self: Recorder, one: Any, figures: Any) -> None:
        add(self, one, figures)
        if one.update == update:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Recorder, "add", adding)


def test_it_learns_and_says_what_it_did(train: Run, settings: Settings, tmp_path: Path) -> None:
    result = train(settings())
    rows = [row for row in lines(tmp_path / "run" / METRICS) if "loss" in row]
    assert (result["status"], result["updates"], result["targets"]) == ("done", 40, 40 * 64)
    assert [row["update"] for row in rows] == list(range(1, 41))
    assert rows[-1]["targets"] == 40 * 64
    # The peak at the end of the warm-up (a twentieth of 40), the floor (a tenth of it) at the very end.
    assert [rows[at]["learning_rate"] for at in (0, 1, 39)] == pytest.approx([0.005, 0.01, 0.001])
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert result["validation"]["loss"] < rows[0]["loss"] - 0.3
    assert result["validation"]["families"].keys() == {"code", "prose"}
    assert result["mfu"] is None and "'cpu' is not known" in result["mfu_reason"]
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result
    validations = [
        (row["update"], row.get("final", False)) for row in told(tmp_path / "run") if "validation" in row
    ]
    assert validations == [(10, False), (20, False), (30, False), (40, False), (40, True)]


def test_a_mixture_of_experts_trains_the_same_way_with_its_auxiliary_loss_apart(
    train: Run, settings: Settings, mixture: dict[str, Any], tmp_path: Path
) -> None:
    result = train(settings(shape=mixture))
    rows = [row for row in told(tmp_path / "run") if "loss" in row]
    assert result["status"] == "done"
    assert all(row["auxiliary"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3


@pytest.mark.parametrize(
    ("policy", "every", "kept"),
    [
        ("none", None, []),
        ("final", None, [40]),
        ("interval", None, [40]),
        ("all", None, [10, 20, 30, 40]),
        ("all", 15, [15, 30, 40]),
    ],
)
def test_the_state_is_kept_as_the_policy_says(
    train: Run, settings: Settings, tmp_path: Path, policy: str, every: int | None, kept: list[int]
) -> None:
    train(settings(checkpoints={"policy": policy, "every": every}))
    assert [int(one.name.removeprefix("update-")) for one in checkpoints.found(tmp_path / "run")] == kept


@pytest.mark.parametrize("at", [1, 10, 17, 39])
def test_a_stop_keeps_the_state_and_going_on_gives_the_same_bits(
    train: Run, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    whole = train(settings(), "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, at)
        stopped = train(settings(checkpoints__policy="final"))
    assert (stopped["status"], stopped["updates"], stopped["checkpoint_update"]) == ("stopped", at, at)
    resumed = train(
        settings(runtime__prefetch=False, runtime__log_every=7, checkpoints__policy="all"), resume=True
    )
    assert resumed["session"]["continued_from_update"] == at
    assert (resumed["weights"], resumed["validation"]) == (whole["weights"], whole["validation"])
    assert told(tmp_path / "run") == told(tmp_path / "whole")
    assert resumed["session"]["targets"] == (40 - at) * 64
    assert resumed["seconds"]["training"] > resumed["session"]["training"]


@pytest.mark.parametrize("name", [checkpoints.MODEL, checkpoints.OPTIMISER])
def test_a_flipped_bit_is_refused_and_the_checkpoint_before_gives_the_same_bits(
    train: Run, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked, out = settings(checkpoints__policy="all"), tmp_path / "run"
    whole = train(asked, "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 25)
        train(asked)
    newest = checkpoints.found(out)[-1]
    content = bytearray((newest / name).read_bytes())
    # The lowest bit of the last number: what no look at the values would find.
    content[-4] ^= 1
    (newest / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} is damaged: it has another checksum") as refused:
        train(asked, resume=True)
    assert refused.value.remedy == f"remove {newest} to go on from update-00000020"
    shutil.rmtree(newest)
    resumed = train(asked, resume=True)
    assert resumed["session"]["continued_from_update"] == 20
    assert (resumed["weights"], resumed["validation"]) == (whole["weights"], whole["validation"])
    assert told(out) == told(tmp_path / "whole")


def test_a_finished_training_that_is_resumed_does_nothing_twice(
    train: Run, settings: Settings, tmp_path: Path
) -> None:
    first = train(settings())
    before = told(tmp_path / "run")
    result = (tmp_path / "run" / RESULT).read_bytes()
    assert train(settings(), resume=True) == first
    assert told(tmp_path / "run") == before
    assert (tmp_path / "run" / RESULT).read_bytes() == result


def test_a_training_that_was_killed_after_its_last_update_tells_its_loss(
    train: Run, settings: Settings, tmp_path: Path
) -> None:
    first = train(settings())
    before = told(tmp_path / "run")
    (tmp_path / "run" / RESULT).unlink()
    again = train(settings(), resume=True)
    assert told(tmp_path / "run") == before
    assert (again["weights"], again["targets"], again["session"]["targets"]) == (first["weights"], 40 * 64, 0)
    assert again["train_loss"] == first["train_loss"]


def test_a_finished_training_goes_on_where_more_is_asked_of_it(
    train: Run, settings: Settings, tmp_path: Path
) -> None:
    first = train(settings(validation__full=False))
    assert first["validation"] is None
    assert train(settings(), resume=True)["validation"]["targets"] > 0


@pytest.mark.parametrize("at", [20, 40])
def test_a_stop_during_a_validation_loses_none_of_its_rows(
    train: Run, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    asked = settings(validation__full=False, checkpoints={"policy": "final"})
    train(asked, "whole")
    evaluate, add = evaluation.evaluate, Recorder.add
    last = 0

    def adding(self: Recorder, one: Any, figures: Any) -> None:
        nonlocal last
        last = one.update
        add(self, one, figures)

    def evaluating(*given: Any) -> Any:
        if last == at:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*given)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "add", adding)
        patch.setattr(evaluation, "evaluate", evaluating)
        stopped = train(asked)
    assert (stopped["status"], stopped["checkpoint_update"]) == ("stopped", at)
    assert train(asked, resume=True)["status"] == "done"
    assert told(tmp_path / "run") == told(tmp_path / "whole")


def test_weights_that_are_not_finite_are_not_kept(train: Run, settings: Settings, tmp_path: Path) -> None:
    """Such a decay takes them beyond float32 in one update, whose loss and gradient are finite."""
    decay = {"learning_rate": 1e6, "beta2": 0.98, "weight_decay": 1e37}
    result = train(settings(optimiser=decay, checkpoints={"policy": "interval", "every": 1}))
    assert (result["status"], result["reason"]) == ("nonfinite", "a weight is not finite after update 1")
    assert (result["checkpoint_update"], checkpoints.latest(tmp_path / "run")) == (0, None)


def test_a_validation_loss_that_is_not_finite_is_the_end(
    train: Run, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: {"code": evaluation.Sum(float("inf"), 8)})
    result = train(settings())
    assert (result["status"], result["reason"]) == ("nonfinite", "the validation loss is inf after update 10")
    assert result["checkpoint_update"] == 10


def test_a_checkpoint_with_the_optimiser_of_another_model_is_refused(
    train: Run, settings: Settings, tmp_path: Path
) -> None:
    train(settings(budget__updates=20))
    train(settings(budget__updates=20, shape__feedforward=32), "other")
    mine, others = (next((tmp_path / name).rglob(checkpoints.OPTIMISER)) for name in ("run", "other"))
    mine.write_bytes(others.read_bytes())
    (tmp_path / "run" / RESULT).unlink()
    with pytest.raises(
        UserError, match=r"optimiser\.safetensors is damaged: it has \d+ bytes where state\.json"
    ):
        train(settings(budget__updates=20), resume=True)
    # One from before sizes and checksums were kept.
    state = mine.with_name(checkpoints.STATE)
    state.write_text(json.dumps(json.loads(state.read_text()) | {"files": {}}))
    with pytest.raises(UserError, match=r"optimiser\.safetensors is of another model: exp_avg\."):
        train(settings(budget__updates=20), resume=True)
    assert mine.read_bytes() == others.read_bytes()


def test_a_short_boundary_update_divides_by_its_own_targets(
    train: Run, settings: Settings, tmp_path: Path
) -> None:
    """25 sequences in two virtual epochs: 4 4 4 and 4 4 4 1; the last has one sequence, and the loss of one."""
    train(settings(budget={"targets": 25 * 16, "virtual_epochs": 2}))
    rows = [row for row in told(tmp_path / "run") if "loss" in row]
    assert [row["valid"] // 16 for row in rows] == [4, 4, 4, 4, 4, 4, 1]
    assert all(4 < row["loss"] < 7 for row in rows)


def test_padding_is_no_target_where_a_pass_ends(
    train: Run, settings: Settings, cache: TokenCache, tmp_path: Path
) -> None:
    order = Order(cache, "train", 16, 0)
    assert order.targets % 16, "the last window of this cache is a short one"
    one = len(order)
    result = train(settings(batch_tokens=16 * one, microbatch=one, budget={"updates": 2}))
    assert result["targets"] == 2 * order.targets
    assert [row["valid"] for row in told(tmp_path / "run") if "loss" in row] == [order.targets] * 2


def test_waiting_for_data_is_a_part_of_how_fast_it_trains(
    train: Run, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = feed.take

    def slowly(*given: Any) -> Any:
        time.sleep(0.02)
        return take(*given)

    monkeypatch.setattr(feed, "take", slowly)
    result = train(settings(budget__updates=10, runtime__log_every=1))
    assert result["seconds"]["training"] > 10 * 0.02


def test_what_a_checkpoint_follows_from_is_on_the_disk_before_it(
    train: Run, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power may lose what was not synced: then no checkpoint may be there that is ahead of its rows,
    or that is not whole.
    """
    happened: list[str] = []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda one: (happened.append(Path(f"/proc/self/fd/{one}").readlink().name), sync(one))
    )
    monkeypatch.setattr(
        Path, "rename", lambda one, to: (happened.append(f"to {to.name}"), rename(one, to))[1]
    )
    train(settings(budget={"updates": 1}, validation={"full": False, "subset": 0}))
    at = happened.index("to update-00000001")
    assert happened[at - 5 : at - 1] == [METRICS, checkpoints.MODEL, checkpoints.OPTIMISER, checkpoints.STATE]
    assert happened[at - 1].startswith(".writing-")
    assert happened[at + 1] == "checkpoints"


def test_the_share_of_the_peak_is_that_of_the_steady_rate(
    train: Run, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings()
    assert asked.shape is not None
    monkeypatch.setattr(flops, "peak_flops", lambda name: 1e12 if name == "cpu" else None)
    result = train(asked)
    cost = flops.flops_per_token(asked.shape)
    assert result["mfu"] == pytest.approx(result["steady_tokens_per_second"] * cost / 1e12)
    assert "mfu_reason" not in result


@pytest.mark.parametrize("at", [1, 5, 12])
def test_one_nan_gradient_under_a_finite_loss_moves_nothing_and_is_named(
    train: Run, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    train(settings(checkpoints={"policy": "all", "every": 1}), "whole")
    poison(monkeypatch, at)
    seen = watched(monkeypatch)
    result = train(settings(checkpoints={"policy": "interval", "every": 3}, validation__subset=0))
    assert (result["status"], result["reason"]) == (
        "nonfinite",
        f"the gradient's norm is nan at update {at}; nothing moved since update {at - 1}",
    )
    assert [row["update"] for row in told(tmp_path / "run")] == list(range(1, at))
    last = checkpoints.latest(tmp_path / "run")
    assert (0 if last is None else last.position.update) == result["checkpoint_update"] == (at - 1) // 3 * 3
    (model,) = seen
    if at > 1:
        before = {one.position.update: one for one in map(read, checkpoints.found(tmp_path / "whole"))}[
            at - 1
        ]
        kept = checkpoints.tensors(before, checkpoints.MODEL)
        assert all(torch.equal(one, kept[name]) for name, one in model.state_dict().items())
    assert all(bool(torch.isfinite(one).all()) for one in model.parameters())


def test_after_it_the_last_checkpoint_goes_on(
    train: Run, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(settings(), "whole")
    with monkeypatch.context() as patch:
        poison(patch, 25)
        assert train(settings())["status"] == "nonfinite"
    assert train(settings(), resume=True)["weights"] == whole["weights"]
    assert told(tmp_path / "run") == told(tmp_path / "whole")


def test_memory_that_runs_out_is_an_outcome(
    train: Run, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")

    monkeypatch.setattr(Losses, "__call__", full)
    result = train(settings())
    assert result["status"] == "oom"
    assert result["reason"].endswith("set microbatch to 1 (it is 2)")


def test_a_disk_that_fills_during_a_checkpoint_costs_nothing_that_was_kept(
    train: Run, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real limit on file size, below the checkpoint's and above the metrics', stands in for the full disk."""
    whole = train(settings(), "whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    add = Recorder.add

    def filling(self: Recorder, one: Any, figures: Any) -> None:
        add(self, one, figures)
        if one.update == 12:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    asked = settings(checkpoints={"policy": "interval", "every": 5})
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "add", filling)
        try:
            with pytest.raises(MachineError, match=r"update-00000015 cannot be written") as full:
                train(asked)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "--resume: the one before is kept" in full.value.remedy
    assert [one.name for one in (tmp_path / "run" / "checkpoints").iterdir()] == ["update-00000010"]
    again = train(asked, resume=True)
    assert (again["session"]["continued_from_update"], again["weights"]) == (10, whole["weights"])


def test_another_recipe_is_refused_and_nothing_changes(
    train: Run, settings: Settings, tmp_path: Path
) -> None:
    train(settings())
    described = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(
        UserError, match=r"is of another recipe: optimiser\.learning_rate was 0\.01 and is now 0\.5"
    ):
        train(settings(optimiser__learning_rate=0.5), resume=True)
    assert (tmp_path / "run" / "run.json").read_bytes() == described


def read(place: Path) -> checkpoints.Checkpoint:
    state = json.loads((place / checkpoints.STATE).read_text())
    return checkpoints.Checkpoint(place, checkpoints.Position(**state["position"]), state["identity"], {})


def poison(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """One NaN among the gradients of update `at`, under a loss that is finite."""
    plain = training.update

    def poisoned(losses: Any, optimiser: Any, microbatches: Any, number: int, rate: float) -> Any:
        if number == at:
            parameter = optimiser.parameters[0]
            handle = parameter.register_hook(
                lambda gradient: gradient.index_fill(0, torch.tensor([7]), float("nan"))
            )
            try:
                figures = plain(losses, optimiser, microbatches, number, rate)
            finally:
                handle.remove()
            assert torch.isfinite(figures.loss)
            return figures
        return plain(losses, optimiser, microbatches, number, rate)

    monkeypatch.setattr(training, "update", poisoned)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that are trained from here on."""
    seen: list[Any] = []
    init = training.Training.__init__

    def started(self: Any, *given: Any) -> None:
        init(self, *given)
        seen.append(self.model)

    monkeypatch.setattr(training.Training, "__init__", started)
    return seen
