"""PyTorch's caching allocator told to use expandable segments: address space into which memory is mapped page by page as
it is needed, in place of one allocation for each large request, whose rests fit nothing else.

(PyTorch, "CUDA semantics", `expandable_segments`.) Told by call: the allocator reads its environment variable while torch is
imported, which a forked learner's parent did, and the golden process must not: what it exports has to be plain memory. A
handle says itself of which kind it is, so that a process with expandable segments opens a plain one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from coresident.engines.pool.card.device_rules import ALLOCATOR

SETTING = "expandable_segments:True"


def expand() -> None:
    """Use expandable segments in this process from its next allocation on; before its first, in all. Needs no card."""
    import torch

    # Of PyTorch 2.9 and later; what it was called before warns where there is this one.
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (tell or torch.cuda.memory._set_allocator_settings)(settings())


def settings(environment: Mapping[str, str] = os.environ) -> str:
    """What the environment asks of the allocator, with expandable segments: telling it anew resets what is left out."""
    given = next((value for name in ALLOCATOR if (value := environment.get(name))), "")
    return ",".join(filter(None, (given, SETTING)))
