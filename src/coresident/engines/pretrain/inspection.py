"""What can be said about a training before it starts: that its settings and data are good, and what it needs.

Nothing is written here. A built-in corpus that was not prepared yet is taken on trust.
"""

from __future__ import annotations

from pathlib import Path

from coresident.engines.pretrain import recipe
from coresident.engines.pretrain.parameters import Train
from coresident.model.shape import parameters_of
from coresident.text import manifest
from coresident.text.cache import TokenCache
from coresident.workload import Needs

# Weights, gradients and two moments, all float32.
BYTES_PER_PARAMETER = 16
# An interpreter with torch, rounded down: needs are a lower bound.
INTERPRETER = 250 << 20


def inspect(parameters: Train) -> Needs:
    """Check the settings and the token cache, and say what the training needs. Raises UserError for bad input."""
    asked = recipe.resolve(parameters, "", "float32")
    inputs: tuple[Path, ...] = ()
    if parameters.data.cache_dir is not None:
        place = Path(parameters.data.cache_dir).expanduser()
        recipe.check_vocabulary(TokenCache.open(place), asked.shape)
        # The manifest holds the checksum of every other file.
        inputs = (place / manifest.FILE,)
    size = parameters_of(asked.shape) * BYTES_PER_PARAMETER
    return Needs(memory=size + INTERPRETER, on_card=size, inputs=inputs)
