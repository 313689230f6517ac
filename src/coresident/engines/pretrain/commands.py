"""`coresident pretrain prepare | train | evaluate | export`: from text to a model that transformers loads, without a lab."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident import whole
from coresident.engines.pretrain import checkpoints, device, directory, memory, recipe
from coresident.engines.pretrain.outcomes import OutOfMemory, memory_outcome, smaller
from coresident.engines.pretrain.parameters import Train
from coresident.engines.pretrain.progress import Progress
from coresident.engines.pretrain.stopping import stopping
from coresident.errors import MachineError, UserError, interruptible
from coresident.model.shape import parameters_of
from coresident.text import corpus
from coresident.text.cache import TokenCache
from coresident.text.prepare import Prepare
from coresident.text.prepare import prepare as make_cache

if TYPE_CHECKING:
    from coresident.engines.pretrain.training import Ended
    from coresident.model.llama import Llama

CACHE = "CORESIDENT_CACHE"
# Bytes of tokens that are compared with their checksums without being asked: a second's work at most.
READ_AT_ONCE = 1 << 30


def prepare(settings: Prepare, out: Path, workers: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Make a token cache, and what is in it."""
    cache = _made(settings, out, workers, say)
    left = corpus.left_out(settings.source)
    return {
        "cache": str(out),
        "identity": cache.identity,
        "vocabulary": cache.vocabulary,
        **{
            split: {family: len(cache.tokens(split, family)) for family in cache.families}
            for split in ("train", "validation")
        },
        **({"left_out": left} if left else {}),
    }


def _made(settings: Prepare, out: Path, workers: int, say: Callable[[str], None]) -> TokenCache:
    tenths = 0

    def progress(done: float, total: float, unit: str) -> None:
        nonlocal tenths
        reached = int(10 * done / total) if total else int(done // 10_000_000)
        if reached > tenths:
            tenths = reached
            say(f"{done:,.0f}{f' of {total:,.0f}' if total else ''} {unit}")

    return make_cache(settings, out, workers, progress, say)


def open_cache(settings: Train, say: Callable[[str], None] = lambda _: None) -> TokenCache:
    """The training's token cache; without one the built-in corpus, prepared for the model's vocabulary where it is not yet,
    of which `say` hears.

    Raises UserError for one that is not what it was, or that has more tokens than the model.
    """
    cache = _found(settings, say)
    recipe.check_vocabulary(cache, recipe.shape_of(settings))
    if settings.data.verify or cache.size < READ_AT_ONCE:
        cache.verify()
    return cache


def _found(settings: Train, say: Callable[[str], None]) -> TokenCache:
    if settings.data.cache_dir is not None:
        return TokenCache.open(Path(settings.data.cache_dir).expanduser())
    asked = Prepare(vocabulary=recipe.shape_of(settings).vocabulary)
    short = hashlib.sha256(json.dumps(asked.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:8]
    given = os.environ.get(CACHE)
    home = Path(given) if given else Path.home() / ".cache" / "coresident"
    place = home / "tokens" / f"python-{asked.vocabulary}-{short}"
    if place.is_dir():
        return TokenCache.open(place)
    say(f"preparing the built-in corpus in {place}: some 20 seconds, once (data.cache_dir names another)")
    return _made(asked, place, 1, say)


def anywhere(settings: Train) -> Train:
    """The same, so that it means the same token cache from any working directory."""
    given = settings.data.cache_dir
    if given is None:
        return settings
    place = str(Path(given).expanduser().absolute())
    return settings.model_copy(update={"data": settings.data.model_copy(update={"cache_dir": place})})


def train(
    settings: Train,
    out: Path,
    where: str,
    resume: bool,
    say: Callable[[str], None],
    now: Callable[[str], None],
    free: int | None = None,
) -> dict[str, Any]:
    """Train into the directory `out` and return what `result.json` holds.

    `where` is `cpu` or a card's UUID; `say` takes lines for the user, `now` the state of the moment. `free` are the bytes of
    memory that the host has for it (None: it is not asked). Raises UserError for what cannot be trained so, MachineError
    where it cannot be done here; then nothing that was there is lost.
    """
    from coresident.engines.pretrain.recorder import NonFinite
    from coresident.engines.pretrain.training import Training

    settings = anywhere(settings)
    with directory.locked(out, resume), interruptible(lambda: _how_on(out)), stopping(say) as stop:
        cache = open_cache(settings, say)
        place = device.settle(recipe.runtime_of(settings), where)
        asked = recipe.resolve(settings, cache.identity, device.precision(settings.runtime, where))
        if resume and (before := finished(out, asked)) is not None:
            say("it is trained already: nothing is left to do")
            return before
        if free is not None and where == "cpu":
            memory.check_training(
                memory.load(asked, memory.held_out(cache, asked)), asked.blocks_per_update, free
            )
        try:
            with memory_outcome("take a smaller model: this one, with its optimiser, does not fit"):
                training = Training(asked, cache, out, place, stop, Progress(say, now))
            directory.describe(out, settings, asked, cache.manifest.tokenizer)
            (out / directory.RESULT).unlink(missing_ok=True)
            result = result_of(asked, training.run(), place)
        except (NonFinite, OutOfMemory) as error:
            kept = checkpoints.latest(out)
            result = {
                "status": "oom" if isinstance(error, OutOfMemory) else "nonfinite",
                "reason": str(error),
                "checkpoint_update": 0 if kept is None else kept.position.update,
                "recipe": recipe.digest(asked.identity()),
            }
        whole.write_json(out / directory.RESULT, result)
        if result["status"] == "stopped":
            say(f"stopped after update {result['updates']}: {_how_on(out)}")
    return result


def _how_on(out: Path) -> str:
    """In words, how a training that ended early goes on, from what there is of it."""
    if not (out / directory.RUN).is_file():
        return "repeat the command"
    kept = checkpoints.found(out)
    if kept:
        return f"go on from {kept[-1]} with --resume"
    return "no state is kept, so that --resume begins anew"


def finished(out: Path, asked: recipe.Recipe) -> dict[str, Any] | None:
    """What `result.json` says where it is the end of this very training, which wants nothing more; None where it goes on.

    Raises UserError where its weights are not there any more as they were written.
    """
    try:
        told = json.loads((out / directory.RESULT).read_text(encoding="utf-8"))
        if told["status"] != "done" or told["recipe"] != recipe.digest(asked.identity()):
            return None
        kept = checkpoints.latest(out)
        update = 0 if kept is None else kept.position.update
        wanted = 0 if asked.settings.checkpoints.policy == "none" else told["updates"]
        validated = told["validation"] is not None or not asked.settings.validation.full
        if not (validated and update == told["checkpoint_update"] and update >= wanted):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if kept is not None:
        checkpoints.check_whole(kept, checkpoints.MODEL, asked.shape)
    return dict(told)


def result_of(asked: recipe.Recipe, ended: Ended, place: Any) -> dict[str, Any]:
    """What became of a training: its losses, and its times over all sessions (`seconds`) and this one (`session`)."""
    from coresident.model.flops import flops_per_token, peak_flops

    found, position = ended.recorder, ended.position
    steady = found.steady_rate()
    name = device.name(place)
    peak = peak_flops(name)
    mfu = None if peak is None or steady is None else steady * flops_per_token(asked.shape) / peak
    why = (
        f"the peak of {name!r} is not known"
        if peak is None
        else "no window after the first"
        if steady is None
        else None
    )
    return {
        "status": ended.status,
        "updates": position.update,
        "targets": position.targets,
        "parameters": parameters_of(asked.shape),
        "train_loss": ended.train_loss,
        "validation": ended.validation,
        "seconds": {"training": position.training_seconds, "elapsed": position.elapsed_seconds},
        "session": {
            "seconds": ended.session_seconds,
            "training": found.session_seconds,
            "targets": found.session_targets,
            "first_update": found.first_seconds,
            "continued_from_update": ended.continued,
        },
        "tokens_per_second": _per(position.targets, position.training_seconds),
        "elapsed_tokens_per_second": _per(position.targets, position.elapsed_seconds),
        "steady_tokens_per_second": steady,
        "mfu": mfu,
        **({} if why is None else {"mfu_reason": why}),
        "attention": ended.kernel,
        "device": name,
        "peak_memory_bytes": device.peak_memory(place),
        "checkpoint_update": ended.kept,
        "weights": ended.weights,
        "recipe": recipe.digest(asked.identity()),
    }


def _per(work: float, seconds: float) -> float | None:
    return work / seconds if seconds else None


def evaluate(
    run: Path,
    where: str,
    subset: int | None = None,
    batch: int | None = None,
    data: Path | None = None,
    free: int | None = None,
) -> dict[str, Any]:
    """The newest checkpoint's loss on the validation split (or `subset` targets of it) of the cache that it was trained on, or
    of another with the same tokenizer: whole, by family, and beside a unigram model's. `free` is as in `train`.
    """
    from coresident.engines.pretrain import evaluation
    from coresident.engines.pretrain.update import Losses

    settings = directory.saved(run)
    if data is not None:
        settings = settings.model_copy(
            update={"data": settings.data.model_copy(update={"cache_dir": str(data)})}
        )
    cache = open_cache(settings)
    place = device.settle(recipe.runtime_of(settings), where)
    checkpoint, model = load(run, settings)
    check_tokenizer(run, cache)
    if data is None and checkpoint.identity["data"] != json.dumps(cache.identity):
        raise UserError(
            f"{cache.path} is not the token cache that {run} was trained on",
            "put that one back, or name one of the same tokenizer (--cache)",
        )
    size = batch or settings.validation.batch
    # How it was trained is no reason to compile or to capture here, or to insist on a kernel that this device lacks.
    runtime = settings.runtime.model_copy(update={"compile": None, "compile_mode": "default"})
    kind = device.dtype(device.precision(runtime, where))
    losses = Losses(model, runtime, kind, frozenset({size}))
    text = evaluation.held_out(cache, model.shape.context, subset)
    if free is not None and where == "cpu":
        largest = min(size, max(len(ids) for _, ids in text.values()))
        memory.check_evaluation(model.shape, largest, runtime.loss_chunk, free)
    try:
        with memory_outcome(smaller("--batch", size)):
            model.to(place)
            found = evaluation.evaluate(losses, text, size, place)
    except OutOfMemory as error:
        raise MachineError(error.problem, error.remedy) from error
    assert found is not None
    if not math.isfinite(evaluation.whole(found).loss):
        raise UserError(
            f"the validation loss of {checkpoint.place} is {evaluation.whole(found).loss}",
            "train with a smaller optimiser.learning_rate: its weights are too large for what they compute",
        )
    common = evaluation.unigram(cache, text)
    return {
        "update": checkpoint.position.update,
        **evaluation.told(found),
        "unigram": {"loss": evaluation.whole(common).loss, "families": evaluation.told(common)["families"]},
    }


def export(run: Path, out: Path) -> dict[str, Any]:
    """Write the newest checkpoint and its tokenizer as a Hugging Face directory."""
    from coresident.model import huggingface

    settings = directory.saved(run)
    checkpoint, model = load(run, settings)
    cache = open_cache(settings)
    check_tokenizer(run, cache)
    huggingface.export(model, cache.tokenizer_dir, out)
    return {"model": str(out), "update": checkpoint.position.update, "parameters": parameters_of(model.shape)}


def check_tokenizer(run: Path, cache: TokenCache) -> None:
    """Raise UserError where the tokens of `cache` do not mean what those that `run` was trained on do."""
    if directory.tokenizer(run) != dict(cache.manifest.tokenizer):
        raise UserError(
            f"{cache.path} has another tokenizer than {run} was trained with",
            "prepare it with the tokenizer of that training's cache (--set tokenizer=CACHE/tokenizer)",
        )


def load(run: Path, settings: Train) -> tuple[checkpoints.Checkpoint, Llama]:
    """The model of a training's newest checkpoint, on the host. Raises UserError where there is none yet."""
    from coresident.model.llama import Llama

    model = Llama(recipe.shape_of(settings))

    def read() -> checkpoints.Checkpoint:
        found = checkpoints.latest(run)
        if found is None:
            raise UserError(
                f"{run} holds no checkpoint",
                "train it further (`--resume`), with another checkpoints.policy than none",
            )
        model.load_state_dict(checkpoints.tensors(found, checkpoints.MODEL, model.state_dict()))
        return found

    return checkpoints.settled(run, read), model
