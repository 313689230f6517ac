"""Where a token's host time goes: nanoseconds a name, added up."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

# What the host does for a token: waits for the device's router, decides what to evict, waits for the disk, issues copies,
# launches kernels.
WAIT, POLICY, READ, INSTALL, LAUNCH = "wait", "policy", "read", "install", "launch"
NAMES = (WAIT, POLICY, READ, INSTALL, LAUNCH)


class Span:
    """Charges the time between enter and exit. One object a name, entered again and again, never inside itself: a layer takes
    microseconds, and a context made for each would be a good part of them.
    """

    __slots__ = ("nanoseconds", "start")

    def __init__(self) -> None:
        self.nanoseconds = 0
        self.start = 0

    def __enter__(self) -> None:
        self.start = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self.nanoseconds += time.perf_counter_ns() - self.start


@dataclass
class Clock:
    """`with clock(POLICY): ...` charges what happens inside to that name."""

    spans: dict[str, Span] = field(default_factory=lambda: {name: Span() for name in NAMES})

    def __call__(self, name: str) -> Span:
        return self.spans[name]

    @property
    def spent(self) -> dict[str, int]:
        """Nanoseconds by name."""
        return {name: span.nanoseconds for name, span in self.spans.items()}

    def clear(self) -> None:
        """Start anew."""
        for span in self.spans.values():
            span.nanoseconds = 0
