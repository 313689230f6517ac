"""From parameters to a decoder: the one place where a model, a budget, a tier and a policy meet."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coresident import cuda
from coresident.engines.moe import budget
from coresident.engines.moe.cache import Cache
from coresident.engines.moe.decoder.decoder import Decoder, Replay, Watch
from coresident.engines.moe.layout.record import RecordFormat
from coresident.engines.moe.models import dense as dense_weights
from coresident.engines.moe.models.architecture import Architecture, named, require_context
from coresident.engines.moe.models.checkpoint import open_checkpoint
from coresident.engines.moe.models.dense import Dense
from coresident.engines.moe.models.origins import Drawn, Files, Origin
from coresident.engines.moe.parameters import Decode, Model
from coresident.engines.moe.policies import Policy, policy
from coresident.engines.moe.predictors import counting
from coresident.engines.moe.provision import Say, host_of, reader_of
from coresident.engines.moe.residency.clock import Clock
from coresident.engines.moe.residency.experts import Experts
from coresident.engines.moe.residency.slots import Slots
from coresident.engines.moe.tiers.host import Host, Staged
from coresident.engines.moe.tiers.readers import Reader
from coresident.engines.moe.traces import files, traces
from coresident.errors import UserError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Engine:
    """A decoder and what it stands on. `close` gives memory and threads back."""

    origin: Origin
    form: RecordFormat
    decoder: Decoder
    experts: Experts
    reader: Reader | None

    @property
    def cache(self) -> Cache:
        return self.experts.cache

    @property
    def slots(self) -> Slots:
        return self.experts.slots

    @property
    def host(self) -> Host:
        return self.experts.host

    def close(self) -> None:
        self.slots.close()
        self.host.close()
        for file in self.reader.files if self.reader else ():
            file.close()


def open_model(model: Model) -> Origin:
    """The model's files, or its drawn weights. Raises UserError for what we do not compute."""
    if model.path is not None:
        return Files(open_checkpoint(Path(model.path).expanduser()))
    return Drawn(named(model.config or "", model.layers), model.seed)


def device_of(where: str) -> torch.device:
    """`cpu`, or the card `where` (a UUID), which this process then sees alone. Raises MachineError without one."""
    if where == "cpu":
        return torch.device("cpu")
    os.environ["CUDA_VISIBLE_DEVICES"] = where
    card = cuda.card()
    # float32 means float32: what is compared with a reference must not be rounded to ten bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    return card


def dtype_of(asked: Decode, device: torch.device) -> torch.dtype:
    """What products are computed in: float32 on a CPU and bfloat16 on a card, where it is not said."""
    if asked.dtype != "auto":
        return _DTYPES[asked.dtype]
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def form_of(asked: Decode, origin: Origin) -> RecordFormat:
    """How experts are kept."""
    found = origin.architecture
    encoding: Any = {"stored": origin.encoding, "bf16": "BF16", "q4": "Q4"}[asked.encoding]
    return RecordFormat(found.width, found.expert_width, encoding)


def always_resident(found: Architecture, dtype: torch.dtype, context: int, batch: int) -> int:
    """Bytes on the device besides slots: dense weights, and keys and values of `batch` rows of `context` tokens."""
    cache = 2 * found.layers * batch * found.kv_heads * context * found.head_width * dtype.itemsize
    return dense_weights.nbytes(found, dtype) + cache


def capacities_of(
    asked: Decode, origin: Origin, form: RecordFormat, dtype: torch.dtype, context: int, batch: int
) -> list[int]:
    """Slots of each layer that has experts."""
    found = origin.architecture
    if asked.slots is not None:
        return budget.from_slots(found, asked.slots)
    if asked.slots_by_layer is not None:
        return budget.by_layer(found, asked.slots_by_layer)
    if asked.device_memory is not None:
        memory = budget.parse_size(asked.device_memory, "device_memory")
        return budget.from_bytes(found, memory, always_resident(found, dtype, context, batch), form.size)
    return [found.experts] * len(found.mixtures)


def build(
    asked: Decode,
    origin: Origin,
    device: torch.device,
    context: int,
    batch: int,
    say: Say = lambda _: None,
    watch: Watch | None = None,
    replay: Replay | None = None,
) -> Engine:
    """A decoder for `batch` texts of at most `context` tokens."""
    found = origin.architecture
    require_context(found, context)
    dtype, form = dtype_of(asked, device), form_of(asked, origin)
    capacities = capacities_of(asked, origin, form, dtype, context, batch)
    ranked = policy(asked.policy, origin.layers, origin.experts, _popularity(asked, origin), asked.half_life)
    clock = Clock()
    weights = dense_weights.load(origin, device, dtype, context)
    at_once, on_card = min(found.top_k * batch, found.experts), device.type == "cuda"
    with ExitStack() as broken_off:
        reader = reader_of(asked, origin, form, say)
        for file in reader.files:
            broken_off.callback(file.close)
        host = host_of(asked, reader, origin, at_once, on_card, say)
        broken_off.callback(host.close)
        if on_card:
            # Copies may still read what is unpinned next.
            broken_off.callback(torch.cuda.synchronize, device)
        engine = _built(
            asked, origin, form, weights, ranked, capacities, host, reader, context, clock, watch, replay
        )
        broken_off.pop_all()
    return engine


def resident(engine: Engine, asked: Decode) -> Engine:
    """The same model with every expert resident, from the same host tier; it shares dense weights with `engine`.

    What it reads is compared with its checksum whatever was asked: a damaged record would be both sides' of a comparison.
    """
    found = engine.origin.architecture
    if isinstance(engine.host, Staged):
        engine.host.check()
    complete = [found.experts] * engine.origin.layers
    decoder = engine.decoder
    return _built(
        asked.model_copy(update={"preload": True}),
        engine.origin,
        engine.form,
        decoder.dense,
        policy("lru", engine.origin.layers, engine.origin.experts),
        complete,
        engine.host,
        None,
        decoder.context,
        Clock(),
        None,
        decoder.replay,
    )


def _built(
    asked: Decode,
    origin: Origin,
    form: RecordFormat,
    weights: Dense,
    ranked: Policy,
    capacities: Sequence[int],
    host: Host,
    reader: Reader | None,
    context: int,
    clock: Clock,
    watch: Watch | None,
    replay: Replay | None,
) -> Engine:
    found = origin.architecture
    device, dtype = weights.embedding.device, weights.embedding.dtype
    cache = Cache(ranked, tuple(capacities), origin.experts)
    slots = Slots(form, tuple(capacities), origin.experts, device, clock)
    experts = Experts(cache, slots, host, dtype, clock)
    if asked.preload:
        experts.preload()
    kind = _decoder_kind(asked, device)
    return Engine(origin, form, kind(found, weights, experts, context, watch, replay), experts, reader)


def _decoder_kind(asked: Decode, device: torch.device) -> Callable[..., Decoder]:
    if asked.kernels == "plain" or (asked.kernels == "auto" and device.type == "cpu"):
        if asked.fills == "device":
            raise UserError(
                "only fused kernels on a card bring experts in", "set fills: auto, or kernels: fused"
            )
        return Decoder
    if device.type == "cpu":
        raise UserError("fused kernels need a card", "set kernels: plain, or give --device cuda")
    from coresident.engines.moe.decoder.fused import FusedDecoder

    return partial(FusedDecoder, fills=asked.fills)


def _popularity(asked: Decode, origin: Origin) -> list[list[float]] | None:
    if asked.popularity is None:
        return None
    file = Path(asked.popularity).expanduser()
    if file.is_dir():
        whole = files.read(file)
        if isinstance(origin, Files) and asked.routing == "own":
            traces.same_model(whole, origin.identity, str(origin.checkpoint.path))
        counted: list[list[float]] = counting.frequency(whole.of("fit")).tolist()
        return counted
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return [[float(score) for score in row] for row in found]
    except OSError as error:
        raise UserError(
            f"{file} cannot be read: {error.strerror}",
            "name the popularity.json of `moe fit-predictor --kind static --out`, or a set of traces",
        ) from None
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{file} ranks no experts: {' '.join(str(error).split())}",
            "write JSON [layers][experts], or name a set of traces",
        ) from None
