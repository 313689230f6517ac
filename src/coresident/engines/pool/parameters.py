"""What one pool run may be told: the base, how it is shared, and how each learner learns."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from coresident.engines.pool import sizes
from coresident.workload import Parameters

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Targets = Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
Files = Annotated[tuple[str, ...], Field(strict=False)]


def _size(text: str) -> str:
    sizes.parse(text)
    return text


Size = Annotated[str, AfterValidator(_size)]


class BaseModelChoice(Parameters):
    """Which frozen base: a local Hugging Face directory, or a named shape with seeded random weights, written once."""

    path: str | None = None
    config: Literal["tiny", "small", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"] | None = None
    weights: Literal["random"] = "random"
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of path (a Hugging Face directory) and config (a named shape)")
        return self


class Data(Parameters):
    """What is learned: a JSONL file for all or for each learner, or pairs made here from a seed.

    `fill` makes every sequence of `python-docs` reach `max_length`, so that no row is padded.
    """

    source: Literal["files", "arithmetic", "python-docs"] = "python-docs"
    files: Files = ()
    pairs: Annotated[int, Field(ge=1)] = 64
    fill: bool = False

    @model_validator(mode="after")
    def _files_where_asked(self) -> Self:
        if (self.source == "files") != bool(self.files):
            raise ValueError("files: needed by source `files`, and by no other")
        if self.fill and self.source != "python-docs":
            raise ValueError("fill: only source `python-docs` can fill every sequence")
        return self


class DPO(Parameters):
    """N LoRA learners trained by direct preference optimisation (Rafailov et al., 2023) over one frozen base.

    `sharing` is how learners hold the base: `none` (a private copy each), `mapped` (each memory-maps the file, as loaders
    do today), `fork` (one read-only arena, learners forked from a zygote), `fork-copy` (the same processes, but each
    learner takes a private copy out of the arena: `fork` with sharing off). `schedule: solo` runs them one after another.

    `loss: sft` imitates completions instead. `reference` says when the base's log-probabilities are worked out: in
    each step, or all before the first. `checkpointing` drops activations and makes them again in the backward pass.
    `start_from` is an adapter that every learner continues; `held_to` says which policy is then its reference.

    `checkpoint_every` n steps (0: never) a learner's state is kept, and found again by the next run in the same place;
    `eval_files` are held out and evaluated every `eval_every` steps and at the end; with `on_failure: continue` a
    learner that fails leaves its siblings at work.

    On a CUDA device, `mps: on` runs them under NVIDIA's Multi-Process Service, and a whole-device peak above
    `device_memory` (such as 80GiB) is out of memory. `deterministic` makes results equal bit for bit from run to run
    where that costs time. `page_cache` says in which state the base's files are read: as found, in memory, or not.
    """

    sharing: Literal["none", "mapped", "fork", "fork-copy"] = "fork"
    schedule: Literal["together", "solo"] = "together"
    learners: Annotated[int, Field(ge=1, le=1024)] = 2
    base: BaseModelChoice = BaseModelChoice(config="tiny")
    data: Data = Data()
    loss: Literal["dpo", "sft"] = "dpo"
    reference: Literal["each-step", "precomputed"] = "each-step"
    checkpointing: bool = False
    start_from: str | None = None
    held_to: Literal["base", "start"] | None = None
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    eval_files: Files = ()
    eval_every: Annotated[int, Field(ge=0)] = 0
    on_failure: Literal["stop", "continue"] = "stop"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    steps: Annotated[int, Field(ge=2)] = 10
    batch: Annotated[int, Field(ge=1)] = 2
    max_length: Annotated[int, Field(ge=8)] = 256
    beta: Annotated[float, Field(gt=0)] = 0.1
    learning_rate: Annotated[float, Field(gt=0)] = 5e-5
    warmup_steps: Annotated[int, Field(ge=0)] = 2
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 1.0
    rank: Annotated[int, Field(ge=1)] = 16
    alpha: Annotated[float, Field(gt=0)] = 16.0
    targets: Targets = LINEAR_LAYERS
    seed: Annotated[int, Field(ge=0)] = 42
    threads: Annotated[int, Field(ge=1)] = 1
    cpus: Annotated[int, Field(ge=0)] = 0
    mps: Literal["on", "off"] = "off"
    device_memory: Size | None = None
    deterministic: bool = False
    page_cache: Literal["keep", "warm", "cold"] = "keep"
