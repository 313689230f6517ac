"""What can be said about a training before it starts: that its settings and data are good, and what it needs.

Nothing is written here. A built-in corpus that was not prepared yet is taken on trust.
"""

from __future__ import annotations

from pathlib import Path

from coresident.engines.pretrain import device, memory, recipe
from coresident.engines.pretrain.parameters import Train
from coresident.text import manifest
from coresident.text.cache import TokenCache
from coresident.workload import Needs


def inspect(parameters: Train) -> Needs:
    """Check the settings and the token cache, and say what the training needs. Raises UserError for bad input."""
    asked = recipe.resolve(parameters, "", device.precision(parameters.runtime, "cpu"))
    inputs: tuple[Path, ...] = ()
    held_out = None
    if parameters.data.cache_dir is not None:
        place = Path(parameters.data.cache_dir).expanduser()
        cache = TokenCache.open(place)
        recipe.check_vocabulary(cache, asked.shape)
        held_out = memory.held_out(cache, asked)
        # The manifest holds the checksum of every other file.
        inputs = (place / manifest.FILE,)
    size = memory.load(asked, held_out).total()
    return Needs(memory=size + memory.INTERPRETER, on_card=size, inputs=inputs)
