"""Which base an adapter belongs to, told from the base's files: the same wherever and in whichever dtype it is held.

Strips of every tensor are hashed, spread over its bytes, so that a base of 15 GB takes a fraction of a second. Another
training, another revision or a conversion changes nearly every strip; that not one bit changed while learners hold
it is the checksums' to say.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack

from coresident.engines.pool.base.base import BaseDir
from coresident.errors import MachineError

STRIPS, STRIP = 16, 4096


def of_base(directory: BaseDir) -> str:
    """SHA-256 (hex) over name, type, shape and strips of each tensor, in the order of names."""
    total = hashlib.sha256()
    with ExitStack() as stack:
        opened: dict[str, int] = {}
        for tensor in sorted(directory.tensors, key=lambda one: one.name):
            file = str(tensor.file)
            try:
                if file not in opened:
                    opened[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(os.close, opened[file])
                total.update(f"{tensor.name} {tensor.dtype} {list(tensor.shape)}\n".encode())
                last = max(tensor.size - STRIP, 0)
                for place in sorted({last * strip // (STRIPS - 1) for strip in range(STRIPS)}):
                    size = min(STRIP, tensor.size - place)
                    total.update(os.pread(opened[file], size, tensor.offset + place))
            except OSError as error:
                raise MachineError(
                    f"{file} cannot be read ({error.strerror})", "check the disk it lies on"
                ) from None
    return total.hexdigest()
