"""What a model is, before any tensor exists: its sizes, and how many parameters those make. Needs no torch, so that
recipes are read and refused at once.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from coresident.workload import Parameters

# Far beyond any machine, and small enough that no product of sizes overflows before a tensor's size is refused.
LARGEST_SIZE, MOST_LAYERS, MOST_PARAMETERS = 1 << 20, 1 << 12, 10**13
_Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0)]


class Mixture(Parameters):
    """A Mixture-of-Experts in the place of every feed-forward block, as in OLMoE (arXiv 2409.02060).

    Each token goes to the `top_k` of `experts` that its router finds likeliest; an expert is a SwiGLU of `width`.
    `normalise` makes the chosen weights sum to one (`norm_topk_prob`). `balance` and `z` weigh the load-balancing and
    the router-z loss.
    """

    experts: _Size
    top_k: _Size
    width: _Size
    normalise: bool = False
    balance: _Share = 0.01
    z: _Share = 0.001

    @model_validator(mode="after")
    def _chosen_exist(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than the {self.experts} experts")
        return self


class ModelShape(Parameters):
    """A decoder of Llama's kind: no biases, as many key heads as query heads, RMSNorm before each block, SwiGLU, RoPE.

    `feedforward` is the SwiGLU's width, absent where there is a `mixture`. `qk_norm` normalises queries and keys over
    the full width, before heads are split, as OLMoE does. `tied` uses one table for embedding and output.
    """

    vocabulary: Annotated[int, Field(ge=2, le=LARGEST_SIZE)]
    layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    width: _Size
    heads: _Size
    feedforward: _Size | None = None
    context: _Size = 1024
    rope_theta: _Positive = 1e4
    eps: _Positive = 1e-5
    qk_norm: bool = False
    tied: bool = True
    mixture: Mixture | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.head_width % 2:
            raise ValueError(f"a head's width {self.head_width} is odd, and rotary positions turn pairs")
        if (self.feedforward is None) == (self.mixture is None):
            raise ValueError("give either feedforward (a dense model) or mixture (experts)")
        if (size := parameters_of(self)) > MOST_PARAMETERS:
            raise ValueError(f"it has {size:,} parameters, and at most {MOST_PARAMETERS:,} are computed with")
        return self

    @property
    def head_width(self) -> int:
        """Dimensions of one head."""
        return self.width // self.heads


def parameters_of(shape: ModelShape) -> int:
    """How many parameters the model has, exactly; a tied table counts once."""
    return _parameters(shape, shape.mixture.experts if shape.mixture else 0)


def active_parameters_of(shape: ModelShape) -> int:
    """How many of them one token uses: all, or, of the experts, the `top_k` it is sent to."""
    return _parameters(shape, shape.mixture.top_k if shape.mixture else 0)


def _parameters(shape: ModelShape, experts: int) -> int:
    width = shape.width
    norms = 2 * width + (2 * width if shape.qk_norm else 0)
    if shape.mixture:
        block = shape.mixture.experts * width + experts * 3 * width * shape.mixture.width
    else:
        block = 3 * width * (shape.feedforward or 0)
    tables = shape.vocabulary * width * (1 if shape.tied else 2)
    return tables + shape.layers * (4 * width * width + block + norms) + width
