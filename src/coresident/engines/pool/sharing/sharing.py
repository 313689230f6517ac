"""Whether a base is shared, measured page by page in the learner that uses it, never taken from what was
asked.

/proc/self/pagemap says for each page of an address range whether it is present, whether this process alone
maps it, and whether it belongs to a file or to shared memory (Linux's
Documentation/admin-guide/mm/pagemap.rst, bits 63, 56, 61). Unlike smaps it is exact for a range, however the
kernel has merged its mappings.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from coresident.engines.pool.base.loading import PAGE

_PRESENT = 1 << 63
_FILE = 1 << 61
_EXCLUSIVE = 1 << 56
# Tensors share their first and last page with neighbours, and a few pages may be swapped: not what sharing is
# about.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Held:
    """How one learner holds its base, in bytes of whole pages.

    `size` is what the base occupies, `resident` what of it is in memory; of that, `private` is anonymous
    memory that this process alone has, and `shared` the rest: a file's pages, shared memory, or pages another
    process maps too. `others` is the part of `shared` that another process had mapped at the time.
    """

    size: int
    resident: int
    private: int
    shared: int
    others: int


@dataclass(frozen=True)
class Decision:
    """What follows for the control `sharing-engaged`: None where it could not be told."""

    passed: bool | None
    reason: str


def held(ranges: Iterable[tuple[int, int]]) -> Held:
    """Measure this process's own pages of the address ranges `[start, end)`. Raises OSError where pagemap is
    closed.
    """
    import numpy

    resident = private = others = size = 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as stream:
        for first, last in _pages(ranges):
            stream.seek(first * 8)
            entries = numpy.frombuffer(_exactly(stream.fileno(), (last - first) * 8), dtype=numpy.uint64)
            present = (entries & numpy.uint64(_PRESENT)) != 0
            file = (entries & numpy.uint64(_FILE)) != 0
            alone = (entries & numpy.uint64(_EXCLUSIVE)) != 0
            size += last - first
            resident += int(present.sum())
            private += int((present & ~file & alone).sum())
            others += int((present & ~alone).sum())
    return Held(size * PAGE, resident * PAGE, private * PAGE, (resident - private) * PAGE, others * PAGE)


def _pages(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges as page numbers `[first, last)`, joined where they touch, so that no page counts twice."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        first, last = start // PAGE, -(-end // PAGE)
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


def _exactly(descriptor: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.read(descriptor, min(count, 1 << 24))
        if not part:
            raise OSError("pagemap ended early")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def decide(asked: str, learners: Sequence[Held | None], together: int) -> Decision:
    """Whether every learner held its base as `asked` (`none`, `mapped`, `fork`, `fork-copy`, `packed` or `trl`).

    `together` is how many processes held the base at the time (the golden one included): from two on, sharing
    must show as pages that another process maps too, not only as pages that could be shared.
    """
    if any(seen is None for seen in learners) or not learners:
        return Decision(None, "the kernel does not let a process read its own page map here")
    alone = asked in ("none", "fork-copy", "packed")
    for number, seen in enumerate(learners):
        assert seen is not None
        if seen.resident < (1 - TOLERANCE) * seen.size:
            return Decision(
                None, f"learner {number} had only {_part(seen.resident, seen)} of its base in memory"
            )
        if asked == "trl":
            # How a peer's loader holds what it loads is its own affair: that it has it is what counts.
            continue
        if alone and seen.shared > TOLERANCE * seen.size:
            return Decision(
                False, f"learner {number} shared {_part(seen.shared, seen)} of a base that was to be its own"
            )
        if not alone and seen.private > TOLERANCE * seen.size:
            return Decision(
                False, f"learner {number} had a private copy of {_part(seen.private, seen)} of the base"
            )
        if not alone and together > 1 and seen.others < (1 - TOLERANCE) * seen.size:
            return Decision(
                False,
                f"learner {number} had only {_part(seen.others, seen)} of its base in common with others",
            )
    return Decision(True, "")


def _part(count: int, seen: Held) -> str:
    return f"{100 * count / seen.size:.1f} %" if seen.size else "none"


def pss(pid: int | str = "self") -> int:
    """The proportional set size of a process in bytes: private pages plus its share of each shared one."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/smaps_rollup names no Pss")
