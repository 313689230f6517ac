"""`moe.decode` inside a measured cell: one decoding, what it is compared with, and what really served it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coresident.engines.moe import assemble, measured, rates
from coresident.engines.moe.assemble import Engine
from coresident.engines.moe.decoder.decoder import Replay
from coresident.engines.moe.decoder.oracle import oracle
from coresident.engines.moe.models.origins import Files
from coresident.engines.moe.parameters import Decode
from coresident.engines.moe.prompts import Prompted, prompts_of
from coresident.engines.moe.residency.clock import NAMES
from coresident.engines.moe.tiers import disk
from coresident.engines.moe.tiers.host import READERS, Staged
from coresident.engines.moe.tiers.memory import allocate
from coresident.engines.moe.tiers.raw import RawReads
from coresident.engines.moe.tiers.readers import RecordReader
from coresident.errors import MachineError
from coresident.workload import Reporter

MIB = 2**20
# Few pages may come or go while we look.
_CACHED = 0.01


def run(asked: Decode, cell: Reporter) -> None:
    """Decode and report."""
    device = assemble.device_of(cell.device)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    with cell.phase("model"):
        origin = assemble.open_model(asked.model)
        prompted = prompts_of(asked, origin)
        longest = max(map(len, prompted.prompts)) + asked.warmup + asked.tokens
        batch = len(prompted.prompts)
        replay = replayed(prompted, device)
        engine = assemble.build(asked, origin, device, longest, batch, lambda _: None, replay=replay)
    try:
        with cell.phase("decode"), _beside(asked, engine) as raw:
            between = None if raw is None else raw.follow
            found = measured.decode(engine, prompted, asked.warmup, asked.tokens, between=between)
        for number, logits in enumerate(found.logits):
            if not logits.isfinite().all():
                raise FloatingPointError(f"step {number}: a score is no finite number")
        _report(cell, asked, engine, prompted, found)
        _served(cell, asked, engine, found, None if raw is None else raw.rate)
        with cell.phase("reference"):
            _compare(cell, asked, engine, prompted, found)
    finally:
        engine.close()


def replayed(prompted: Prompted, device: torch.device) -> Replay | None:
    """A trace's router in the place of the model's own."""
    if prompted.logits is None:
        return None
    table = prompted.logits.to(device)
    return lambda layer, texts, positions: table[:, :, layer][texts, positions]


def _report(
    cell: Reporter, asked: Decode, engine: Engine, prompted: Prompted, found: measured.Measured
) -> None:
    tokens = len(found.seconds) * len(prompted.prompts)
    for one in found.seconds:
        cell.sample("step_ms", 1000 * one)
    cell.metric("step_ms", 1000 * statistics.median(found.seconds), "ms")
    cell.metric("tokens_per_second", tokens / sum(found.seconds), "1/s")
    cell.metric("prefill_seconds", found.prefill_seconds, "s")
    cell.metric("hit_rate", found.hits / found.accesses if found.accesses else 1.0, "1")
    cell.metric("misses_per_token", found.installs / tokens, "1")
    cell.metric("distinct_1", _distinct(found.tokens[asked.warmup : -1]), "1")
    cell.metric("bytes_per_token", found.installs * engine.form.payload / tokens, "B")
    cell.metric("slots", sum(engine.cache.capacities) / engine.origin.layers, "1")
    cell.metric("slots_mib", engine.slots.nbytes / MIB, "MiB")
    always = assemble.always_resident(
        engine.origin.architecture,
        engine.decoder.dense.embedding.dtype,
        engine.decoder.context,
        len(prompted.prompts),
    )
    cell.metric("budget_mib", (engine.slots.nbytes + always) / MIB, "MiB")
    for name in NAMES:
        cell.metric(f"host_{name}_us", found.host.get(name, 0) / tokens / 1000, "us")
    other = sum(found.seconds) * 1e9 - sum(found.host.get(name, 0) for name in NAMES)
    cell.metric("host_other_us", other / tokens / 1000, "us")
    cell.digest("logits", found.digest())
    cell.series("tokens", [float(token) for step in found.tokens for token in step.tolist()])
    cell.environment(
        {
            "model": engine.origin.identity,
            "routing": asked.routing,
            "weights": "files" if isinstance(engine.origin, Files) else "drawn",
            "encoding": engine.form.encoding,
            "capacities": list(engine.cache.capacities),
            "policy": asked.policy,
            "tier": asked.tier,
            "read_path": asked.read_path,
            "warmup": asked.warmup,
            "prompts_split": prompted.split,
            "prompt_tokens": [len(one) for one in prompted.prompts],
            "continuation": "own" if prompted.forced is None else "given",
            "kernels": type(engine.decoder).__name__,
            "fills": engine.decoder.filled_by,
        }
    )


def _distinct(entered: list[Tensor]) -> float:
    """Of each row's tokens [B] in these steps, how many are different ones, on average."""
    rows = torch.stack(entered, 1).tolist()
    return statistics.mean(len(set(row)) / len(row) for row in rows)


def _served(
    cell: Reporter, asked: Decode, engine: Engine, found: measured.Measured, raw: float | None
) -> None:
    """What really served the fetches, beside what was asked, and the disk's `raw` rate."""
    memory, reader = engine.host.memory, engine.reader
    ran: dict[str, Any] = {
        "pinned": memory.pinned,
        "huge_pages": memory.huge,
        "records_read": engine.host.served.read,
    }
    passed, reason = True, ""
    on_card = engine.decoder.device.type == "cuda"
    if on_card and not memory.pinned:
        passed, reason = False, "host memory is not pinned"
    if asked.tier == "pinned":
        if found.bytes_read:
            passed, reason = False, "records were read while decoding"
    elif reader is not None:
        paths = [file.path for file in reader.files]
        ran |= {"direct": all(file.is_direct for file in reader.files), "cached": disk.cached(paths)}
        if asked.tier == "disk" and not ran["direct"]:
            passed, reason = False, "reads went through the page cache"
        elif asked.tier == "disk" and ran["cached"] > _CACHED:
            passed, reason = False, f"{100 * ran['cached']:.1f} % of the files' pages were in memory"
        elif asked.tier == "page-cache" and ran["cached"] < 1 - _CACHED:
            passed, reason = False, f"only {100 * ran['cached']:.1f} % of the files' pages were in memory"
        if found.read_seconds:
            rate = found.bytes_read / found.read_seconds
            cell.metric("fetch_mib_per_second", rate / MIB, "MiB/s")
            if raw is not None:
                cell.metric("raw_read_mib_per_second", raw / MIB, "MiB/s")
                cell.metric("fetch_of_raw", rate / raw, "1")
    cell.control("tier", asked.tier, ran, passed, reason)
    kind = type(engine.decoder).__name__
    wanted = asked.kernels
    cell.control("kernels", wanted, kind, wanted == "auto" or (wanted == "fused") == (kind == "FusedDecoder"))


@contextmanager
def _beside(asked: Decode, engine: Engine) -> Iterator[RawReads | None]:
    """What reads the disk's raw rate between the timed steps; None where there is no file of records to read from."""
    reader, host = engine.reader, engine.host
    if not isinstance(host, Staged) or not isinstance(reader, RecordReader):
        yield None
        return
    # Between steps nothing is wanted of what is in the buffers, unless they are a cache.
    buffers = allocate(READERS, reader.form.size, pin=False).buffers if host.keep else host.memory.buffers
    try:
        raw = RawReads(reader.layout, buffers, asked.tokens)
    except MachineError:
        # A filesystem without direct reads, whose records are read through the page cache.
        yield None
        return
    try:
        yield raw
    finally:
        raw.close()


def _compare(
    cell: Reporter, asked: Decode, engine: Engine, prompted: Prompted, found: measured.Measured
) -> None:
    """The reference's logits along the same tokens, and the bound on speed from measured rates."""
    if asked.reference == "none" and not asked.bound:
        return
    entered = torch.stack(found.tokens[:-1], 1)
    if asked.reference in ("oracle", "transformers"):
        _difference(cell, _whole(asked, engine, prompted, entered), found)
        if not asked.bound:
            return
    whole = assemble.resident(engine, asked)
    try:
        again = measured.decode(whole, prompted, asked.warmup, asked.tokens, entered)
        if asked.reference == "resident":
            _difference(cell, again.logits, found)
        if asked.bound:
            _bound(cell, whole, again, found, len(prompted.prompts))
    finally:
        whole.slots.close()


def _whole(asked: Decode, engine: Engine, prompted: Prompted, entered: Tensor) -> list[Tensor]:
    """The timed steps' logits [steps, B, V] by a version that keeps nothing between tokens."""
    rows = [
        torch.cat((torch.tensor(prompt, device=entered.device), entered[row]))
        for row, prompt in enumerate(prompted.prompts)
    ]
    steps = asked.tokens
    if asked.reference == "transformers":
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(
            asked.model.path, dtype=engine.decoder.dense.embedding.dtype, local_files_only=True
        ).to(entered.device)
        with torch.inference_mode():
            logits = [theirs(row[None]).logits[0, -steps:] for row in rows]
    else:
        plain = oracle(engine.origin, engine.form, engine.decoder.dense)
        with torch.inference_mode():
            logits = [plain.logits(row)[-steps:] for row in rows]
    return list(torch.stack(logits, 1))


def _difference(cell: Reporter, reference: list[Tensor], found: measured.Measured) -> None:
    pairs = list(zip(reference, found.logits, strict=True))
    # Not Python's max, which passes over what is no number.
    worst = float(torch.stack([(one.float() - other.float()).abs().max() for one, other in pairs]).max())
    differ = sum(int((one.argmax(-1) != other.argmax(-1)).sum()) for one, other in pairs)
    cell.metric("logit_difference", worst, "1")
    cell.metric("tokens_differ", differ, "1")


def _bound(
    cell: Reporter, whole: Engine, again: measured.Measured, found: measured.Measured, batch: int
) -> None:
    """1 / (T_resident + layers x t_sync + misses x S / B), a batch's tokens at a time, and what of it was reached."""
    steps = len(found.seconds)
    resident = statistics.mean(again.seconds)
    sync, copy = rates.sync_seconds(whole), rates.record_seconds(whole)
    serial = resident + whole.origin.layers * sync + found.installs / steps * copy
    rate = steps * batch / sum(found.seconds)
    cell.metric("resident_ms", 1000 * resident, "ms")
    cell.metric("sync_us", 1e6 * sync, "us")
    cell.metric("record_copy_us", 1e6 * copy, "us")
    cell.metric("bound_tokens_per_second", batch / serial, "1/s")
    cell.metric("of_bound", rate * serial / batch, "1")
