"""One decoding, measured: warm-up, timed steps, and what of them came from where."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from coresident.engines.moe.assemble import Engine
from coresident.engines.moe.prompts import Prompted


@dataclass
class Measured:
    """Of the timed steps: `seconds` each, counts, host nanoseconds by name and `logits` [steps, B, V]. Of all steps, warm-up
    too, the `tokens` that went in, and the last that came out.
    """

    seconds: list[float] = field(default_factory=list)
    accesses: int = 0
    hits: int = 0
    installs: int = 0
    bytes_read: int = 0
    read_seconds: float = 0.0
    from_memory: int = 0
    host: dict[str, int] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    prefill_seconds: float = 0.0

    def digest(self) -> str:
        """SHA-256 of all logits' bytes."""
        hashed = hashlib.sha256()
        for one in self.logits:
            hashed.update(one.float().cpu().numpy().tobytes())
        return hashed.hexdigest()


def decode(
    engine: Engine,
    prompted: Prompted,
    warmup: int,
    steps: int,
    forced: Tensor | None = None,
    between: Callable[[int], None] | None = None,
) -> Measured:
    """Prefill, `warmup` steps, then `steps` timed ones, greedily or along `forced` [B, warmup + steps].

    A step is timed until its token is on the host: that is when a reader has it. `between` is called after each timed one,
    outside its time, with the bytes that it read.
    """
    decoder, found = engine.decoder, Measured()
    forced = prompted.forced if forced is None else forced
    forced = None if forced is None else forced.to(decoder.device)
    decoder.warm(len(prompted.prompts))
    start = time.perf_counter()
    logits = decoder.prefill(prompted.prompts)
    token = logits.argmax(-1)
    token.tolist()
    found.prefill_seconds = time.perf_counter() - start
    before = _counted(engine)
    for number in range(warmup + steps):
        if number == warmup:
            before = _counted(engine)
            engine.slots.clock.clear()
        entering = token if forced is None else forced[:, number]
        read = engine.host.served.bytes_read
        start = time.perf_counter()
        logits = decoder.step(entering)
        token = logits.argmax(-1)
        token.tolist()
        if number >= warmup:
            found.seconds.append(time.perf_counter() - start)
            found.logits.append(logits.clone())
            if between is not None:
                between(engine.host.served.bytes_read - read)
        found.tokens.append(entering.clone())
    found.tokens.append(token)
    after = _counted(engine)
    for name, value in after.items():
        setattr(found, name, value - before[name])
    found.host = engine.slots.clock.spent
    return found


def _counted(engine: Engine) -> dict[str, float]:
    engine.decoder.settle()
    cache, served = engine.cache, engine.host.served
    accesses, hits = cache.counted()
    return {
        "accesses": accesses,
        "hits": hits,
        "installs": engine.slots.installs,
        "bytes_read": served.bytes_read,
        "read_seconds": served.read_seconds,
        "from_memory": served.from_memory,
    }
