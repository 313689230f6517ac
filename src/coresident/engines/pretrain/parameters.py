"""What one training may be told: the model, its text, the recipe, and how it is executed.

What is left out (None) follows from the preset; `recipe.py` fills it in. The settings of `runtime`, `data`, `checkpoints` and
`validation`, and `microbatch`, change how a training is executed and watched, never what it is: a run may go on with others. (One
exception: the experts of a mixture are balanced within a microbatch, which is then a part of the recipe.)
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coresident.model.shape import ModelShape
from coresident.workload import Parameters

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Data(Parameters):
    """Which token cache: the directory of `pretrain prepare --out`, or without one the built-in corpus, prepared once with
    the model's vocabulary (or as much of it as that text can fill). `verify` compares the checksums of all of it before the
    first update, as is always done below 1 GiB; without it sizes, the manifest and the tokenizer are compared.
    """

    cache_dir: str | None = None
    verify: bool = False


class Optimiser(Parameters):
    """AdamW (Loshchilov and Hutter, 2019); `weight_decay` is for matrices only. `clip` bounds the gradient's global norm."""

    learning_rate: Annotated[float, Field(gt=0, le=1e6)] | None = None
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] | None = None
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip: Positive = 1.0


class Schedule(Parameters):
    """Linear warm-up over the share `warmup` of all targets, then a cosine down to the share `floor` of the rate."""

    warmup: Share = 0.05
    floor: Share = 0.1


class Budget(Parameters):
    """How much is trained: `targets`, or full `updates`, or `per_parameter` targets for each parameter (the preset's
    otherwise), in `virtual_epochs` equal parts (as many as there are updates, if fewer).
    """

    targets: Count | None = None
    updates: Count | None = None
    per_parameter: Annotated[float, Field(gt=0, le=1e9)] | None = None
    virtual_epochs: Count = 10

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in ("targets", "updates", "per_parameter") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {' and '.join(given)}")
        return self


class Runtime(Parameters):
    """How it is executed. `compile` (None: on a card) is for full microbatches; `prefetch` reads the next update's blocks in
    a thread; `threads` are PyTorch's on a CPU; every `log_every` updates the figures come over from the device; `loss_chunk` rows
    of logits are made at a time (0: all), which saves memory and costs time.
    """

    compile: bool | None = None
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    sdpa_backend: Literal["auto", "flash", "cudnn", "reference"] = "auto"
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    deterministic: bool = False
    prefetch: bool = True
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    log_every: Count = 10
    loss_chunk: Annotated[int, Field(ge=0, le=1 << 31)] = 0


class Checkpoints(Parameters):
    """When the state is kept: `none`; `final`: at the end; `interval`: at each virtual epoch's end, or every `every` updates,
    only the newest stays; `all`: the same, and every one stays. A training that is told to stop keeps its state, unless `none`.
    """

    policy: Literal["none", "final", "interval", "all"] = "interval"
    every: Count | None = None


class Validation(Parameters):
    """Sequences a batch; how many targets the subset at each virtual epoch's end has (0: none; None: as the preset says); whether
    the full split is evaluated after the last update.
    """

    batch: Count = 128
    subset: Annotated[int, Field(ge=0)] | None = None
    full: bool = True


class Train(Parameters):
    """A small Llama, or a Mixture-of-Experts one, trained from scratch on one device.

    `preset` names a shape with its recipe; `shape` is one of your own (then 0.001, beta2 0.95 and 32 sequences an update
    are where to start from). `batch_tokens` are the targets of a full update, `microbatch` the sequences computed at once.
    """

    preset: str | None = None
    shape: ModelShape | None = None
    data: Data = Data()
    optimiser: Optimiser = Optimiser()
    schedule: Schedule = Schedule()
    budget: Budget = Budget()
    batch_tokens: Annotated[int, Field(ge=1, le=1 << 28)] | None = None
    microbatch: Count | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    runtime: Runtime = Runtime()
    checkpoints: Checkpoints = Checkpoints()
    validation: Validation = Validation()

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if self.preset is not None and self.shape is not None:
            raise ValueError("give one of preset and shape")
        return self
