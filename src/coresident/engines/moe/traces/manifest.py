"""What a set of routing traces says of itself: which model, which prompts, and how they were generated.

A set is a directory: `manifest.json`, and `routing.safetensors` with every prompt's tokens one after the other. Tensors, all
over [tokens of all prompts]: `tokens` int32; `experts` uint8 (uint16 above 256 experts) [., layers, k], the likeliest first;
`logits` [., layers, experts], raw router logits in float16 or float32, or in uint8 with `spans` (module `packed`); `ahead` [.,
depths, layers, width], which experts layer l's router ranks first on the state that layer l - depth's router saw. `logits` and
`ahead` may be missing.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from coresident.workload import Parameters

MANIFEST, ROUTING = "manifest.json", "routing.safetensors"
SCHEMA: Final = 1

Split = Literal["fit", "held-out"]
Family = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
_Size = Annotated[int, Field(ge=1)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Router(Parameters):
    """The part of a model that traces are about. `identity` differs where a router, a norm or an expert was trained differently.

    `layers` are the numbers of the layers that have experts, in order: a trace's layer axis.
    """

    identity: _Sha256
    architecture: str
    layers: Annotated[tuple[int, ...], Field(min_length=1, strict=False)]
    experts: Annotated[int, Field(ge=2, le=32767)]
    top_k: _Size
    normalise: bool

    @model_validator(mode="after")
    def _chosen_exist(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than the {self.experts} experts")
        return self


class Sampling(Parameters):
    """How the tokens after the prompt were chosen; `temperature` 0 is greedy."""

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0)]
    seed: int
    by: str


class Traced(Parameters):
    """One prompt's trace: `tokens` rows, of which the first `prefill` are the prompt's own, and the rest decode steps."""

    name: str
    family: Family
    split: Split
    prefill: _Size
    tokens: _Size

    @model_validator(mode="after")
    def _prompt_first(self) -> Self:
        if self.prefill > self.tokens:
            raise ValueError(f"prefill {self.prefill} is more than all {self.tokens} tokens")
        return self


class Manifest(Parameters):
    """`manifest.json`."""

    schema_version: Literal[1]
    model: Router
    sampling: Sampling
    depths: Annotated[tuple[_Size, ...], Field(strict=False)] = ()
    prompts: Annotated[tuple[Traced, ...], Field(min_length=1, strict=False)]
    routing_bytes: _Size
    routing_sha256: _Sha256
