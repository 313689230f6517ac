"""Training on a card: nothing is waited for or compiled within a window, and equal work gives equal bits where asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pretrain import device, recipe, training
from coresident.engines.pretrain.course import Course
from coresident.engines.pretrain.directory import METRICS, lines
from coresident.engines.pretrain.feed import Feed
from coresident.engines.pretrain.optimiser import ClippedAdamW
from coresident.engines.pretrain.parameters import Runtime, Train
from coresident.engines.pretrain.update import Losses, update
from coresident.errors import MachineError
from coresident.model.initial import initialise
from coresident.model.llama import Llama
from coresident.text.cache import TokenCache
from coresident.text.order import Cursor, Order

pytestmark = pytest.mark.gpu

Run = Callable[..., dict[str, Any]]
Settings = Callable[..., Train]
WIDER = {"vocabulary": 304, "layers": 2, "width": 128, "heads": 2, "feedforward": 192, "context": 64}
SPARSE = {**WIDER, "feedforward": None, "qk_norm": True, "mixture": {"experts": 8, "top_k": 2, "width": 48}}


@pytest.fixture
def card(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Train]:
    """Trainings of a model that every kernel takes; they run on the first card that this process sees."""
    # Which card is asked for is for the command; here it is whichever is visible.
    monkeypatch.setattr(device, "VISIBLE", "CORESIDENT_TEST_CARD")
    # A process compiles one model's step for a few shapes; here many models are in one.
    torch.compiler.reset()
    return lambda **changed: settings(**{"shape": WIDER, "batch_tokens": 1024, "microbatch": 8, **changed})


def told(out: Path) -> list[dict[str, Any]]:
    return [row for row in lines(out / METRICS) if "loss" in row]


def parts(asked: Train, cache: TokenCache, **runtime: Any) -> tuple[Any, Any, Any]:
    """A model on the card with its losses, its optimiser and its feed."""
    place = torch.device("cuda", 0)
    resolved = recipe.resolve(asked, cache.identity, "bfloat16")
    model = initialise(Llama(resolved.shape), 0).to(place)
    losses = Losses(model, Runtime(**runtime), torch.bfloat16, frozenset({resolved.microbatch}))
    order = Order(cache, "train", resolved.shape.context, 0)
    feed = Feed(order, Course(400, 1, 16), resolved.microbatch, place, 0, Cursor(), True)
    return losses, ClippedAdamW(model, resolved.settings.optimiser), iter(feed)


@pytest.mark.parametrize("compile", [False, True])
def test_an_update_waits_for_nothing(card: Any, cache: TokenCache, compile: bool) -> None:
    """PyTorch itself raises at any operation that would wait for the card."""
    losses, optimiser, feed = parts(card(), cache, compile=compile)
    for number in (1, 2):
        update(losses, optimiser, next(feed).microbatches, number, 0.01)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3, 8):
            update(losses, optimiser, next(feed).microbatches, number, 0.01 / number).stacked()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimiser.rejected.item() == 0


def test_neither_a_new_rate_nor_a_short_batch_compiles_anew(card: Any, cache: TokenCache) -> None:
    torch._dynamo.reset()
    losses, optimiser, feed = parts(card(), cache, compile=True)
    update(losses, optimiser, next(feed).microbatches, 1, 0.01)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(2, 6):
            update(losses, optimiser, next(feed).microbatches, number, 0.01 / number)
        short = next(feed).microbatches[0]
        cut = type(short)(short.tokens[:3], short.targets[:3], 3 * 64)
        update(losses, optimiser, [cut], 6, 0.001)
    assert losses.compiled_calls == 10


def test_what_is_fed_is_what_the_order_says(card: Any, cache: TokenCache) -> None:
    _, _, feed = parts(card(), cache)
    host = iter(
        Feed(Order(cache, "train", 64, 0), Course(400, 1, 16), 8, torch.device("cpu"), 0, Cursor(), False)
    )
    for one, other in zip(feed, host, strict=True):
        busy = torch.randn(2048, 2048, device="cuda")
        for _ in range(4):
            busy = busy @ busy
        for here, there in zip(one.microbatches, other.microbatches, strict=True):
            assert torch.equal(here.tokens.cpu(), there.tokens) and torch.equal(
                here.targets.cpu(), there.targets
            )


@pytest.mark.parametrize("shape", [WIDER, SPARSE], ids=["dense", "experts"])
def test_a_compiled_training_learns_what_an_eager_one_does(
    card: Any, train: Run, tmp_path: Path, shape: dict[str, Any]
) -> None:
    for name, compile in (("eager", False), ("compiled", True)):
        result = train(card(shape=shape, runtime__compile=compile), name, device="0")
        assert result["status"] == "done"
    eager, compiled = told(tmp_path / "eager"), told(tmp_path / "compiled")
    assert eager[0]["loss"] == pytest.approx(compiled[0]["loss"], rel=2e-3)
    assert eager[-1]["loss"] == pytest.approx(compiled[-1]["loss"], abs=0.1)
    assert compiled[-1]["loss"] < compiled[0]["loss"] - 0.5


@pytest.mark.parametrize("mode", ["reduce-overhead"])
def test_a_captured_step_freezes_neither_rate_nor_count(
    card: Any, train: Run, tmp_path: Path, mode: str
) -> None:
    for name in ("default", mode):
        train(card(runtime={"compile": True, "compile_mode": name, "deterministic": True}), name, device="0")
    one, other = told(tmp_path / "default"), told(tmp_path / mode)
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in other], rel=1e-3)


@pytest.mark.parametrize("compile", [False, True])
def test_deterministic_trainings_are_equal_bit_for_bit_and_resume_so(
    card: Any, train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile: bool
) -> None:
    from coresident.engines.pretrain.recorder import Recorder

    runtime = {"compile": compile, "deterministic": True, "log_every": 3}
    first, second = (train(card(runtime=runtime), name, device="0") for name in ("first", "second"))
    assert first["weights"] == second["weights"]
    add = Recorder.add

    def stopping(self: Any, one: Any, figures: Any) -> None:
        import os
        import signal

        add(self, one, figures)
        if one.update == 17:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "add", stopping)
        assert train(card(runtime=runtime), "parted", device="0")["status"] == "stopped"
    again = train(card(runtime={**runtime, "prefetch": False}), "parted", resume=True, device="0")
    assert again["weights"] == first["weights"]
    assert told(tmp_path / "parted") == told(tmp_path / "first")


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_a_forced_kernel_runs_and_is_told(card: Any, train: Run, kernel: str) -> None:
    result = train(card(runtime__sdpa_backend=kernel), device="0")
    assert (result["status"], result["attention"]) == ("done", kernel)


def test_a_forced_kernel_that_cannot_run_is_an_error(card: Any, train: Run) -> None:
    with pytest.raises(MachineError, match="flash attention kernel cannot run"):
        train(card(runtime={"sdpa_backend": "flash", "precision": "float32"}), device="0")


def test_one_nan_gradient_moves_nothing_on_a_card_either(
    card: Any, train: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = training.update

    def poisoned(losses: Any, optimiser: Any, microbatches: Any, number: int, rate: float) -> Any:
        row = torch.tensor([7], device="cuda")
        hook = lambda gradient: gradient.index_fill(0, row, float("nan"))  # noqa: E731
        handle = optimiser.parameters[0].register_hook(hook) if number == 5 else None
        figures = plain(losses, optimiser, microbatches, number, rate)
        if handle is not None:
            handle.remove()
        return figures

    monkeypatch.setattr(training, "update", poisoned)
    result = train(card(runtime__compile=False), device="0")
    assert result["reason"] == "the gradient's norm is nan at update 5; nothing moved since update 4"


def test_memory_that_runs_out_is_an_outcome(card: Any, train: Run) -> None:
    # The model and its optimiser fit (100 MiB), 4,096 positions of 50,000 logits do not.
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.002)
    wide = {"shape": {**WIDER, "vocabulary": 50_000}, "batch_tokens": 4096, "microbatch": 64}
    try:
        result = train(card(**wide), device="0")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert (result["status"], "set microbatch to 32 (it is 64)" in result["reason"]) == ("oom", True)


def test_a_known_cards_share_of_its_peak_is_told(card: Any, train: Run, tmp_path: Path) -> None:
    result = train(card(), device="0")
    known = result["mfu"] is not None
    assert (0 < result["mfu"] < 1) if known else result["device"] in result["mfu_reason"]
    assert result["peak_memory_bytes"] > 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["device"] == torch.cuda.get_device_name(
        0
    )
