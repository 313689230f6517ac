"""What one pool run may be told: the base, how it is shared, and how each learner learns."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from coresident.engines.pool import sizes
from coresident.engines.pool.peers.smolvm.settings import Smolvm
from coresident.workload import Parameters

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Targets = Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
Files = Annotated[tuple[str, ...], Field(strict=False)]


def _size(text: str) -> str:
    sizes.parse(text)
    return text


Size = Annotated[str, AfterValidator(_size)]


class BaseModelChoice(Parameters):
    """Which frozen base: a local Hugging Face directory, or a named shape with seeded random weights, written once.

    `quantise: nf4` holds its linear layers in 4 bits (all but the output layer): a float base is quantised here,
    once, into a directory beside the named ones; one that is in NF4 already is used as it is, whatever is said.
    """

    path: str | None = None
    config: Literal["tiny", "small", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"] | None = None
    weights: Literal["random"] = "random"
    seed: Annotated[int, Field(ge=0)] = 0
    quantise: Literal["none", "nf4"] = "none"

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of path (a Hugging Face directory) and config (a named shape)")
        return self

    @model_serializer(mode="wrap")
    def _default_left_out(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A cell's hash covers its parameters: one that came later must not change the cells that do without it.
        told: dict[str, Any] = handler(self)
        if self.quantise == "none":
            told.pop("quantise", None)
        return told


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


_LATER = ("smolvm", "own", "passes", "dropout", "adapter_products", "step", "optimizer")


class Own(Parameters):
    """What a learner has of its own; what is None it shares with all. `pairs` are its data's; `passes` as in `DPO`."""

    steps: Annotated[int, Field(ge=2)] | None = None
    passes: Annotated[int, Field(ge=0)] | None = None
    pairs: Annotated[int, Field(ge=1)] | None = None
    batch: Annotated[int, Field(ge=1)] | None = None
    max_length: Annotated[int, Field(ge=8)] | None = None
    beta: Annotated[float, Field(gt=0)] | None = None
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    clip: Annotated[float, Field(gt=0)] | None = None
    rank: Annotated[int, Field(ge=1)] | None = None
    alpha: Annotated[float, Field(gt=0)] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_base(cls, given: Any) -> Any:
        for name in ("base", "dtype"):
            if isinstance(given, dict) and name in given:
                raise ValueError(
                    f"a learner has no {name} of its own, since all learn over one base; "
                    f"give {name} beside own, and learners over another base a pool (in a study, an arm) of their own"
                )
        return given


class DPO(Parameters):
    """N LoRA learners trained by direct preference optimisation (Rafailov et al., 2023) over one frozen base.

    `sharing` is how learners hold the base: `none` (a private copy each), `mapped` (each memory-maps the file, as loaders
    do today), `fork` (one read-only arena, learners forked from a zygote), `fork-copy` (the same processes, but each
    learner takes a private copy out of the arena: `fork` with sharing off), `packed` (one process trains all of them over
    one pass of the base). Two peers are measured beside them: `trl` (each process is TRL's own DPOTrainer) and `smolvm`
    (virtual machines; see its settings). `schedule: solo` runs them one after another.

    `loss: sft` imitates completions instead. `reference` says when the base's log-probabilities are worked out: in
    each step, or all before the first. `checkpointing` drops activations and makes them again in the backward pass.
    `start_from` is an adapter that every learner continues; `held_to` says which policy is then its reference.

    `own` gives learners settings of their own: learner k takes entry k, and from the start again where there are fewer
    entries than learners. With `passes` a learner ends after so many passes over its data, if that is before its `steps`
    (0: it does not). `adapter_products: bfloat16` multiplies adapters in the base's dtype, as under autocast; what is
    learned stays in float32. `step` is how a pack steps (`packed/pack.py`): `auto` is `eager` on a CPU and the fastest on a card.

    `checkpoint_every` n steps (0: never) a learner's state is kept, and found again by the next run in the same place;
    `eval_files` are held out and evaluated every `eval_every` steps and at the end; with `on_failure: continue` a
    learner that fails leaves its siblings at work.

    On a CUDA device, `mps: on` runs them under NVIDIA's Multi-Process Service, and a whole-device peak above
    `device_memory` (such as 80GiB) is out of memory. `deterministic` makes results equal bit for bit from run to run
    where that costs time. `page_cache` says in which state the base's files are read: as found, in memory, or not.
    """

    sharing: Literal["none", "mapped", "fork", "fork-copy", "packed", "trl", "smolvm"] = "fork"
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
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
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
    smolvm: Smolvm | None = None
    own: Annotated[tuple[Own, ...], Field(strict=False)] = ()
    passes: Annotated[int, Field(ge=0)] = 0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    adapter_products: Literal["float32", "bfloat16"] = "float32"
    step: Literal["auto", "eager", "compiled", "captured"] = "auto"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dropout:
            raise ValueError(
                "dropout: a policy with dropout is another function than its reference, and its learning another in"
                " every arm: leave it out"
            )
        if self.adapter_products == "bfloat16" != self.dtype:
            raise ValueError(f"adapter_products: bfloat16 is for a bfloat16 base, and dtype is {self.dtype}")
        if self.sharing == "packed" and self.schedule == "solo":
            raise ValueError("schedule: solo is one learner after another, and sharing: packed all at once")
        if self.sharing != "packed" and self.step != "auto":
            raise ValueError("step: only sharing: packed has several kinds of it")
        return self

    def of(self, learner: int) -> DPO:
        """The settings of one learner (from 0): what it shares, with what is its own put in."""
        if not self.own:
            return self
        own = self.own[learner % len(self.own)].model_dump(exclude_none=True)
        if (pairs := own.pop("pairs", None)) is not None:
            own["data"] = self.data.model_copy(update={"pairs": pairs})
        return self.model_copy(update={**own, "own": ()})

    @property
    def at_once(self) -> int:
        """How many processes train at the same time."""
        return 1 if self.schedule == "solo" or self.sharing == "packed" else self.learners

    @model_serializer(mode="wrap")
    def _unset_left_out(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A cell's hash covers its parameters: what is not asked for, and came later, is none of it.
        told: dict[str, Any] = handler(self)
        for name in _LATER:
            if getattr(self, name) == type(self).model_fields[name].default:
                told.pop(name, None)
        return told
