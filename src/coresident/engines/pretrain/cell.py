"""`pretrain.train` inside a measured cell: the same training as the command's, reported to the lab.

A cell whose earlier attempt was interrupted goes on from the checkpoint that it left. Another generation of its block
measures anew, so it has a place of its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident import whole
from coresident.engines.pretrain import commands, device, directory, evaluation, recipe
from coresident.engines.pretrain.parameters import Train
from coresident.engines.pretrain.progress import Progress
from coresident.engines.pretrain.recipe import Recipe
from coresident.engines.pretrain.stopping import stopping
from coresident.errors import MachineError
from coresident.workload import CELL, Reporter

if TYPE_CHECKING:
    from coresident.engines.pretrain.training import Ended

MIB = 2**20


def run(parameters: Train, cell: Reporter) -> None:
    """Train and report. Raises NonFinite (an outcome), MachineError where it was told to stop."""
    out = _place(cell)
    with directory.locked(out, resume=(out / directory.RUN).is_file()), stopping(lambda _: None) as stop:
        with cell.phase("data"):
            cache = commands.open_cache(parameters)
        with cell.phase("model"):
            place = device.settle(recipe.runtime_of(parameters), cell.device)
            asked = recipe.resolve(
                parameters, cache.identity, device.precision(parameters.runtime, cell.device)
            )
            from coresident.engines.pretrain.training import Training

            progress = Progress(report=lambda done, total: cell.progress(done, total, "targets"))
            training = Training(asked, cache, out, place, stop, progress)
            directory.describe(out, parameters, asked, cache.manifest.tokenizer)
        with cell.phase("training"):
            ended = training.run()
        if ended.status != "done":
            raise MachineError(
                f"the training was told to stop after update {ended.position.update}",
                "run the study again: it goes on from there",
            )
        result = commands.result_of(asked, ended, place)
        whole.write_json(out / directory.RESULT, result)
        _report(cell, asked, ended, result, out)
        if ended.validation is not None:
            text = evaluation.held_out(cache, asked.shape.context)
            common = evaluation.whole(evaluation.unigram(cache, text)).loss
            cell.metric("unigram_loss", common, "nat")
            cell.metric("below_unigram", common - ended.validation["loss"], "nat")


def _place(cell: Reporter) -> Path:
    described = os.environ.get(CELL)
    if described is None:
        return cell.work
    generation = json.loads(Path(described).read_text(encoding="utf-8")).get("generation", 0)
    return cell.work / f"g{generation}"


def _report(cell: Reporter, asked: Recipe, ended: Ended, result: dict[str, Any], out: Path) -> None:
    found, session = ended.recorder, result["session"]
    if found.session_seconds:
        cell.metric("tokens_per_second", found.session_targets / found.session_seconds, "1/s")
        cell.metric("elapsed_tokens_per_second", found.session_targets / found.session_elapsed(), "1/s")
        cell.metric("first_update_seconds", session["first_update"], "s")
    if found.rates:
        steady = result["steady_tokens_per_second"]
        for one in found.rates:
            cell.sample("steady_tokens_per_second", one)
        cell.metric("steady_tokens_per_second", steady, "1/s")
        cell.metric("update_ms", 1000 * asked.blocks_per_update * asked.shape.context / steady, "ms")
    if result["mfu"] is not None:
        cell.metric("mfu", result["mfu"], "1")
    if result["peak_memory_bytes"] is not None:
        cell.metric("device_peak_mib", result["peak_memory_bytes"] / MIB, "MiB")
    if ended.train_loss is not None:
        cell.metric("train_loss", ended.train_loss, "nat")
    if ended.validation is not None:
        cell.metric("validation_loss", ended.validation["loss"], "nat")
    cell.metric("updates", ended.position.update, "1", "cumulative")
    cell.metric("targets", ended.position.targets, "1", "cumulative")
    cell.metric("training_seconds", ended.position.training_seconds, "s", "cumulative")
    cell.metric("elapsed_seconds", ended.position.elapsed_seconds, "s", "cumulative")
    told = directory.lines(out / directory.METRICS)
    cell.series("loss", [row["loss"] for row in told if "loss" in row])
    cell.digest("weights", ended.weights)
    _controls(cell, asked, ended, result)


def _controls(cell: Reporter, asked: Recipe, ended: Ended, result: dict[str, Any]) -> None:
    runtime = asked.settings.runtime
    wanted, ran = runtime.sdpa_backend, ended.kernel
    cell.control(
        "attention-kernel",
        wanted,
        ran,
        wanted in ("auto", ran),
        "" if wanted in ("auto", ran) else "another ran",
    )
    effective = device.deterministic()
    cell.control("deterministic", runtime.deterministic, effective, effective == runtime.deterministic)
    wanted_compile = ran_compile = ended.compiled
    if runtime.compile is not None:
        wanted_compile = runtime.compile
    cell.control("compiled", wanted_compile, ran_compile, wanted_compile == ran_compile)
    reason = result.get("mfu_reason")
    cell.environment(
        {"device_name": result["device"], **({} if reason is None else {"mfu": None, "mfu_reason": reason})}
    )
