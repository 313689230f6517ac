"""A training from wherever it is to its end, or to where it is told to stop.

The same code runs for the command and for a measured cell. Between two updates, in this order: what is due is fetched
and written, the state is kept, the model is evaluated, so that nothing that goes wrong later costs what was done before.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coresident.engines.pretrain import checkpoints, device, evaluation
from coresident.engines.pretrain.checkpoints import Position
from coresident.engines.pretrain.course import rate
from coresident.engines.pretrain.directory import METRICS, Rows, lines
from coresident.engines.pretrain.feed import Feed, Portion
from coresident.engines.pretrain.optimiser import ClippedAdamW
from coresident.engines.pretrain.outcomes import memory_outcome, smaller
from coresident.engines.pretrain.progress import Progress
from coresident.engines.pretrain.recipe import Recipe
from coresident.engines.pretrain.recorder import NonFinite, Recorder, Told
from coresident.engines.pretrain.stopping import Stop
from coresident.engines.pretrain.update import Losses, update
from coresident.model.attention import check_kernel, dispatched
from coresident.model.initial import initialise
from coresident.model.llama import Llama
from coresident.text.order import Cursor, Order

if TYPE_CHECKING:
    from coresident.text.cache import TokenCache


@dataclass(frozen=True)
class Ended:
    """How a session ended. `status` is `done` or `stopped`; `position` is where; `kept` is the update of the newest checkpoint.

    `train_loss` is that of the last update, whichever session did it (None: none did),
    `validation` is the full evaluation as its row tells it, `weights` a hash of the weights, `kernel` the attention kernel
    that ran, `compiled` whether a compiled step did, `continued` the update that this session went on from.
    """

    status: str
    position: Position
    kept: int
    train_loss: float | None
    validation: Mapping[str, Any] | None
    weights: str
    kernel: str
    compiled: bool
    recorder: Recorder
    session_seconds: float
    continued: int


class Training:
    """Builds the model and goes on from the newest checkpoint in `out`, if there is one.

    Raises UserError for data or a checkpoint that do not belong, MachineError for a forced kernel that cannot run here.
    """

    def __init__(
        self,
        recipe: Recipe,
        cache: TokenCache,
        out: Path,
        place: torch.device,
        stop: Stop,
        progress: Progress,
    ) -> None:
        self._recipe, self._cache, self._out = recipe, cache, out
        self._place, self._stop, self._progress = place, stop, progress
        settings, shape = recipe.settings, recipe.shape
        kind = device.dtype(recipe.precision)
        kernel = settings.runtime.sdpa_backend
        check_kernel(kernel, shape, place, kind)
        self._kernel = dispatched(kernel, shape, place, kind)
        self._identity = recipe.identity()
        self._subset = settings.validation.subset or 0
        self._validation = self._texts()
        checkpoints.clear_unfinished(out)
        kept = checkpoints.latest(out)
        self._model = Llama(shape, kernel, settings.runtime.loss_chunk)
        self._position = Position() if kept is None else kept.position
        if kept is None:
            initialise(self._model, settings.seed)
        else:
            checkpoints.check_belongs(kept, self._identity)
            weights = checkpoints.tensors(kept, checkpoints.MODEL, self._model.state_dict())
            self._model.load_state_dict(weights)
        self._model.to(place)
        full = frozenset({recipe.microbatch, settings.validation.batch})
        self._losses = Losses(self._model, settings.runtime, kind, full)
        self._optimiser = ClippedAdamW(self._model, settings.optimiser, in_place=self._losses.captures)
        if kept is not None:
            self._optimiser.restore(
                checkpoints.tensors(kept, checkpoints.OPTIMISER, self._optimiser.expected())
            )
        self._kept = self._continued = self._position.update

    @property
    def model(self) -> Llama:
        """The model as it is now."""
        return self._model

    def run(self) -> Ended:
        """Train. Raises NonFinite naming the update, or OutOfMemory; what was kept before stays."""
        self._began = time.monotonic()
        self._rows = Rows(self._out, self._position.update)
        # Told by an earlier session, which was killed after that.
        told = lines(self._out / METRICS)
        self._evaluated = {row["update"] for row in told if "validation" in row}
        self._last_loss = next((row["loss"] for row in reversed(told) if "loss" in row), None)
        self._recorder = Recorder(
            self._rows,
            self._recipe.shape.mixture is not None,
            self._optimiser.rejected,
            self._position.training_seconds,
            self._position.elapsed_seconds,
        )
        with memory_outcome(self._recipe.less_memory()):
            self._train()
            return self._ended()

    def _train(self) -> None:
        course, settings = self._recipe.course, self._recipe.settings
        order = Order(self._cache, "train", self._recipe.shape.context, settings.seed)
        cursor = (
            Cursor() if self._position.cursor is None else Cursor.model_validate(dict(self._position.cursor))
        )
        feed = Feed(
            order,
            course,
            self._recipe.microbatch,
            self._place,
            self._position.blocks,
            cursor,
            settings.runtime.prefetch,
        )
        self._progress.started(self._position.targets, course.blocks * self._recipe.shape.context)
        try:
            stopped = self._between()
            portions = iter(feed)
            while not stopped:
                # Before the data: waiting for them is a part of how fast it trains.
                began = time.monotonic()
                if (portion := next(portions, None)) is None:
                    break
                self._update(portion, began)
                stopped = self._between()
        finally:
            feed.close()

    def _update(self, portion: Portion, began: float) -> None:
        course, before = self._recipe.course, self._position
        peak = self._recipe.settings.optimiser.learning_rate
        assert peak is not None
        done = before.blocks + portion.blocks
        now = rate(self._recipe.settings.schedule, peak, done, course.blocks)
        number = before.update + 1
        self._recorder.begin(began)
        figures = update(self._losses, self._optimiser, portion.microbatches, number, now)
        self._position = replace(
            before,
            update=number,
            blocks=done,
            targets=before.targets + portion.valid,
            cursor=portion.cursor.model_dump(),
        )
        epoch = course.epoch(before.blocks)
        self._recorder.add(
            Told(number, epoch, portion.valid, self._position.targets, now, portion.samples), figures
        )

    def _between(self) -> bool:
        """What is due after an update (or before the first of this session). Returns whether to stop here: read once, so that
        a signal which comes after the state was not kept is obeyed after the next update.
        """
        asked = self._stop.asked
        settings, done = self._recipe.settings, self._position
        every = settings.checkpoints.every
        ends = self._ends()
        over = done.blocks >= self._recipe.course.blocks
        due = ends if every is None else done.update % every == 0 or over
        kept = {"none": False, "final": over, "interval": due, "all": due}[settings.checkpoints.policy]
        stop = asked and settings.checkpoints.policy != "none"
        first = self._recorder.first_seconds is None
        if first or ends or kept or stop or self._recorder.pending >= settings.runtime.log_every:
            self._flush()
        if kept or stop:
            self._keep()
        if self._owes_evaluation() and not asked and self._evaluate(self._subset, final=False) is None:
            # Told to stop in it: here, so that the next session begins with it.
            if settings.checkpoints.policy != "none":
                self._keep()
            return True
        return asked

    def _owes_evaluation(self) -> bool:
        """Whether a virtual epoch ends here whose row is still missing."""
        return bool(self._subset) and self._ends() and self._position.update not in self._evaluated

    def _ends(self) -> bool:
        course, done = self._recipe.course, self._position.blocks
        return done > 0 and course.end(course.epoch(done) - 1) == done

    def _flush(self) -> None:
        window = self._recorder.flush()
        if window is not None:
            self._progress.window(self._recorder.last, self._recipe.course.epochs)

    def _keep(self) -> None:
        if self._position.update <= self._kept:
            return
        if not all(torch.isfinite(one).all() for one in self._model.parameters()):
            raise NonFinite(f"a weight is not finite after update {self._position.update}")
        self._rows.settle()
        training, elapsed = self._recorder.seconds()
        self._position = replace(self._position, training_seconds=training, elapsed_seconds=elapsed)
        checkpoints.save(
            self._out,
            self._position,
            self._identity,
            self._model.state_dict(),
            self._optimiser.state(),
            keep=self._recipe.settings.checkpoints.policy == "all",
        )
        self._kept = self._position.update

    def _texts(self) -> dict[str, Any]:
        """What is evaluated, by the size of the subset (None: all), so that a split without text is said before training."""
        validation = self._recipe.settings.validation
        sizes: list[int | None] = [self._subset] if self._subset else []
        sizes += [None] if validation.full else []
        return {
            str(size): evaluation.held_out(self._cache, self._recipe.shape.context, size) for size in sizes
        }

    def _evaluate(self, subset: int | None, final: bool) -> Mapping[str, Any] | None:
        batch = self._recipe.settings.validation.batch
        with memory_outcome(smaller("validation.batch", batch)):
            found = evaluation.evaluate(
                self._losses, self._validation[str(subset)], batch, self._place, lambda: self._stop.asked
            )
        if found is None:
            return None
        told = evaluation.told(found)
        if not math.isfinite(told["loss"]):
            raise NonFinite(f"the validation loss is {told['loss']} after update {self._position.update}")
        row = {"update": self._position.update, "validation": told, **({"final": True} if final else {})}
        self._rows.add([row])
        self._evaluated.add(self._position.update)
        self._progress.evaluated(self._position.update, told, final)
        return told

    def _ended(self) -> Ended:
        done = self._position.blocks >= self._recipe.course.blocks and not self._owes_evaluation()
        validation = None
        if done and self._recipe.settings.validation.full:
            validation = self._evaluate(None, final=True)
            done = validation is not None
        training, elapsed = self._recorder.seconds()
        return Ended(
            "done" if done else "stopped",
            replace(self._position, training_seconds=training, elapsed_seconds=elapsed),
            self._kept,
            self._recorder.losses[-1] if self._recorder.losses else self._last_loss,
            validation,
            weights_digest(self._model),
            self._kernel,
            self._losses.compiled_calls > 0,
            self._recorder,
            time.monotonic() - self._began,
            self._continued,
        )


def weights_digest(model: Llama) -> str:
    """SHA-256 of the weights' bytes, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + b"\0")
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
