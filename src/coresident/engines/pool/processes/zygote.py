"""The zygote: imports everything, builds the model without a number in it, computes nothing, and forks the
learners.

`python -m coresident.engines.pool.processes.zygote JOB CHANNEL ARENA PARENT CHILD:CHANNEL...`, a child being a learner's number
or -1 for the golden process.

A child of a process that ran one parallel operation hangs in its own first one, and a device context does not
survive a fork. So the zygote proves, before its first fork, that it has one thread, and before every fork that
it has not touched a card. Without an arena to share it has no model: then it is only a warm interpreter, from
which solo learners start one after another. `ARENA` is -1 where the base is on a card; then the golden process is
the zygote's first child, since it needs the same imports.
"""

from __future__ import annotations

import gc
import os
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from coresident.engines.pool.job import Job
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.processes.channel import Channel, Closed
from coresident.engines.pool.processes.failure import leave, told
from coresident.engines.pool.processes.learner_process import Inherited, learn
from coresident.engines.pool.processes.parent import die_with
from coresident.engines.pool.processes.untouched import imports_alone, require_no_device, untouched


class Zygote:
    """The zygote's state: what its children inherit, and which of them live."""

    def __init__(self, job: Job, channel: Channel, arena: int, ends: dict[int, int]) -> None:
        self._job, self._channel, self._arena = job, channel, arena
        self._ends = ends
        self._inherited = Inherited(arena=arena)
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, None)
        self._children: dict[int, int] = {}
        self._work: dict[str, Callable[[Channel, int], None]] = {"fork": self._learn, "golden": self._hold}

    def prepare(self) -> None:
        """Import and build, then prove that forking is safe; say `ready`."""
        start = time.monotonic()
        # A collection leaves holes, which children would fill, and writes into every object it visits: both
        # copy pages that are shared (Python's documentation of gc.freeze).
        gc.disable()
        with imports_alone():
            import_all()
            imported = time.monotonic()
            if self._job.from_arena:
                self._inherited = build(self._job, self._arena)
        built = time.monotonic()
        threads = untouched()
        gc.freeze()
        self._channel.tell(
            "ready",
            pid=os.getpid(),
            import_seconds=imported - start,
            build_seconds=built - imported,
            threads=threads,
        )

    def serve(self) -> None:
        """Fork when told, report every child's end, leave when told. Raises `Closed` without a driver."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.data)
                    continue
                for order in self._channel.pending():
                    if order["event"] == "leave":
                        return
                    self._fork(str(order["event"]), int(order["end"]), str(order["member"]))

    def _fork(self, what: str, number: int, member: str) -> None:
        require_no_device()
        end = self._ends.pop(number)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be(self._work[what], number, end, parent)
        os.close(end)
        descriptor = os.pidfd_open(pid)
        self._children[descriptor] = pid
        self._selector.register(descriptor, selectors.EVENT_READ, (descriptor, pid, member))

    def _be(self, work: Callable[[Channel, int], None], number: int, end: int, parent: int) -> None:
        code = 1
        try:
            die_with(parent)
            # A sibling's end held open here would hide that the sibling is gone.
            for other in (*self._ends.values(), *self._children):
                os.close(other)
            self._selector.close()
            self._channel.close()
            channel = Channel.inherited(end)
            with told(channel):
                work(channel, number)
            code = 0
        except (Closed, SystemExit):
            pass
        finally:
            leave(code)

    def _learn(self, channel: Channel, number: int) -> None:
        learn(self._job, number, channel, self._inherited)

    def _hold(self, channel: Channel, _: int) -> None:
        from coresident.engines.pool.processes import golden_device

        golden_device.serve(self._job, channel)

    def _reap(self, child: tuple[int, int, str]) -> None:
        descriptor, pid, member = child
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(descriptor)
        del self._children[descriptor]
        os.close(descriptor)
        self._channel.tell("exited", member=member, code=os.waitstatus_to_exitcode(status))


def build(job: Job, arena: int) -> Inherited:
    """What is the same for every learner and holds no number of the base."""
    from coresident.engines.pool.learning.model import build_on_meta
    from coresident.text import tokenizer

    where = Path(job.base)
    own = [job.parameters.of(number) for number in range(job.parameters.learners)]
    skeletons = {(one.rank, one.alpha): build_on_meta(where, one) for one in _distinct(own)}
    return Inherited(skeletons, tokenizer.load(where), arena)


def _distinct(settings: Sequence[DPO]) -> list[DPO]:
    return list({(one.rank, one.alpha): one for one in settings}.values())


def import_all() -> None:
    """Everything a learner imports, so that no child has to."""
    import numpy  # noqa: F401
    import peft  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401
    import transformers

    # transformers resolves these names on first use.
    for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "PreTrainedTokenizerFast"):
        getattr(transformers, name)
    from coresident.engines.pool.base import checksum  # noqa: F401
    from coresident.engines.pool.card import deterministic, device, device_checksum  # noqa: F401
    from coresident.engines.pool.learning import adapter, data, learner, model, training  # noqa: F401
    from coresident.engines.pool.processes import golden_device  # noqa: F401
    from coresident.engines.pool.sharing import arena, device_sharing, fault, ipc, sharing  # noqa: F401
    from coresident.text import pythondocs, tokenizer  # noqa: F401


def main(arguments: list[str]) -> None:
    """Start from the command line that the driver gives."""
    file, channel_fd, arena, parent, *pairs = arguments
    die_with(int(parent))
    channel = Channel.inherited(int(channel_fd))
    ends: dict[int, int] = {}
    for pair in pairs:
        number, _, descriptor = pair.partition(":")
        ends[int(number)] = int(descriptor)
    try:
        with told(channel):
            zygote = Zygote(Job.load(file), channel, int(arena), ends)
            zygote.prepare()
            zygote.serve()
    except (Closed, SystemExit):
        leave(1)
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1:])
