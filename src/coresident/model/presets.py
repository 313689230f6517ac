"""The models that have a name. The five dense ones are those of the published recipe; the mixtures are ours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from coresident.errors import UserError, nearest
from coresident.model.shape import Mixture, ModelShape

_VOCABULARY = 32_000


def _dense(layers: int, width: int, heads: int, feedforward: int) -> ModelShape:
    return ModelShape(
        vocabulary=_VOCABULARY, layers=layers, width=width, heads=heads, feedforward=feedforward
    )


# An expert's width is never half the model's: then a transposed [gate, up] would pass every check of shapes.
PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        "20m": _dense(8, 320, 5, 896),
        "50m": _dense(10, 512, 8, 1408),
        "90m": _dense(14, 640, 10, 1792),
        "250m": _dense(20, 960, 15, 2560),
        "500m": _dense(24, 1280, 20, 3456),
        "smoke": ModelShape(vocabulary=2048, layers=2, width=64, heads=4, feedforward=176, context=128),
        "moe-smoke": ModelShape(
            vocabulary=2048,
            layers=2,
            width=64,
            heads=4,
            context=128,
            qk_norm=True,
            mixture=Mixture(experts=8, top_k=2, width=48),
        ),
        "moe-64": ModelShape(
            vocabulary=_VOCABULARY,
            layers=16,
            width=512,
            heads=8,
            qk_norm=True,
            mixture=Mixture(experts=64, top_k=8, width=192),
        ),
    }
)


def preset(name: str) -> ModelShape:
    """The shape called `name`; raises UserError, which names the nearest, for one that does not exist."""
    if name not in PRESETS:
        raise UserError(f"there is no model preset {name!r}", nearest(name, PRESETS))
    return PRESETS[name]
