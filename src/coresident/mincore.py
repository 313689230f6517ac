"""Which pages of a file are in memory, as the kernel says it (mincore(2)): Python has no call for it."""

from __future__ import annotations

import ctypes
import mmap
import os


def resident(descriptor: int) -> bytes:
    """A byte for each page of the file; its lowest bit is set where the page is in memory. Raises OSError."""
    size = os.fstat(descriptor).st_size
    if not size:
        return b""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    # Python's own mapping gives no address of a read-only one.
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        found = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        if libc.mincore(address, size, found):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found.raw
    finally:
        libc.munmap(address, size)
