"""What `moe.decode` and `coresident moe generate` can be asked. Needs no torch, so that mistakes are told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coresident.engines.moe.policies import Name as PolicyName
from coresident.workload import Parameters

_Count = Annotated[int, Field(ge=1)]


class Model(Parameters):
    """A Hugging Face directory `path`; or the shape `config`, of it the first `layers`, with random weights drawn from `seed`."""

    path: str | None = None
    config: str | None = None
    layers: _Count | None = None
    seed: int = 0

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError(
                "a model is either path (a Hugging Face directory) or config (a shape, random weights); give one"
            )
        if self.layers is not None and self.config is None:
            raise ValueError(
                "layers is for a config, and a model of files has those that it has; leave layers out"
            )
        return self


class Prompts(Parameters):
    """What is decoded after: `text` as given; texts of a family from Python's documentation or sources (of the held-out part);
    or `drawn` tokens. `batch` rows at once, each of `length` tokens at most. `follow`: what is decoded is the rest of the same
    text, whatever the model would say; its own continuation may repeat itself, and then asks for the same few experts.
    """

    text: tuple[str, ...] = ()
    source: Literal["drawn", "python-docs", "python-sources"] = "drawn"
    length: _Count = 32
    batch: _Count = 1
    seed: int = 0
    follow: bool = False

    @model_validator(mode="after")
    def _a_text_a_row(self) -> Self:
        if self.text and len(self.text) != self.batch:
            raise ValueError(
                f"text has {len(self.text)} texts for a batch of {self.batch}; set batch to their number"
            )
        return self


# Of `Decode`, what only a measured decoding has.
MEASURING = frozenset({"prompts", "tokens", "warmup", "routing", "trace", "reference", "bound"})


class Decode(Parameters):
    """One decoding.

    Memory: `slots` a layer, or `slots_by_layer`, or a `device_memory` such as 6GiB for dense weights, keys and values, and
    slots together; none of them: all experts resident. `encoding` is how experts are kept: as stored, in bfloat16 whatever the
    files hold, or 4-bit. `tier` is where missing ones come from; `host_memory` lets the disk tiers keep records in memory as
    well. `read_path` is how they are read; `layout` a file of records (made under CORESIDENT_CACHE where it is needed and not
    given). `popularity` ranks experts for the policy static: a JSON file, [layers][experts], or a set of traces, whose fit
    prompts are counted. `routing: replay` takes tokens and router logits from `trace` (a set of traces). `fills` is who brings
    in what a step misses: the host, or kernels on the device, which need every expert in pinned memory. `reference` is what
    logits are compared with: the same model all resident, its plain version (`oracle`), or transformers. `bound` also measures
    what the speed is bounded by.
    """

    model: Model
    encoding: Literal["stored", "bf16", "q4"] = "stored"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    slots: _Count | None = None
    slots_by_layer: tuple[_Count, ...] | None = None
    device_memory: str | None = None
    policy: PolicyName = "lru"
    popularity: str | None = None
    half_life: Annotated[float, Field(gt=0)] = 64.0
    tier: Literal["pinned", "disk", "page-cache"] = "pinned"
    host_memory: str | None = None
    read_path: Literal["record", "record-parallel", "scattered", "scattered-parallel"] = "record"
    layout: str | None = None
    verify: bool = False
    kernels: Literal["auto", "plain", "fused"] = "auto"
    fills: Literal["auto", "host", "device"] = "auto"
    preload: bool = True
    prompts: Prompts = Prompts()
    tokens: _Count = 64
    warmup: Annotated[int, Field(ge=0)] = 8
    routing: Literal["own", "replay"] = "own"
    trace: str | None = None
    reference: Literal["none", "resident", "oracle", "transformers"] = "resident"
    bound: bool = False
    threads: _Count | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        budgets = [
            name for name in ("slots", "slots_by_layer", "device_memory") if getattr(self, name) is not None
        ]
        if len(budgets) > 1:
            raise ValueError(
                f"{budgets[0]} and {budgets[1]} exclude each other; drop {budgets[0]} or {budgets[1]}"
            )
        if (self.routing == "replay") != (self.trace is not None):
            raise ValueError(
                "routing: replay needs a trace, and a trace is for routing: replay; give both or neither"
            )
        if self.trace is not None and self.prompts.follow:
            raise ValueError("a trace brings the tokens to follow; leave prompts.follow out")
        if self.policy == "static" and self.popularity is None:
            raise ValueError(
                "policy static needs a ranking of the experts; name one by popularity=FILE (--set popularity=FILE), "
                "such as a set of traces or the popularity.json of `moe fit-predictor --kind static --out`"
            )
        if self.read_path.startswith("scattered") and (self.encoding != "stored" or self.layout is not None):
            raise ValueError(
                "scattered reads take experts from the model's own files, as they are stored; "
                "leave encoding, 4 bits and layout out, or set read_path: record"
            )
        if self.host_memory is not None and self.tier == "pinned":
            raise ValueError(
                "host_memory is for the tiers disk and page-cache, and pinned holds every expert; "
                "set tier: disk (--tier disk), or leave it out"
            )
        if self.fills == "device" and self.tier != "pinned":
            raise ValueError(
                f"fills: device needs every expert in pinned memory, and tier is {self.tier}; set tier: pinned, or fills: auto"
            )
        if self.reference == "transformers" and (self.model.path is None or self.routing == "replay"):
            raise ValueError(
                "the reference transformers needs a model of files and its own routing; "
                "set model.path and routing: own, or another reference"
            )
        return self

    def inputs(self) -> tuple[Path, ...]:
        """Files whose content matters."""
        named = (self.layout, self.trace, self.popularity)
        return tuple(Path(name).expanduser() for name in named if name is not None)
