"""Device memory for resident experts: one arena of slots, a map from expert to slot, and the order of fills and reads.

On a card fills run on a stream of their own. Two waits keep them apart from kernels: a fill waits for the kernel that last
read its slot, and a kernel waits for the fills of the slots it reads. On a CPU everything happens at once, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coresident.engines.moe.cache import Fill
from coresident.engines.moe.layout.record import RecordFormat, Stored, Weights
from coresident.engines.moe.residency.clock import INSTALL, READ, Clock
from coresident.engines.moe.tiers.host import Host
from coresident.engines.moe.tiers.memory import HostMemory, allocate
from coresident.errors import InternalError, MachineError


@dataclass
class Slots:
    """`capacities[layer]` slots a layer. `map` [layers, experts] int32 on the device: an expert's slot in the arena, or -1.

    `arena` [slots, record] of uint8 holds them. `slot` and `free` are the host's books: each expert's slot, and each layer's free
    ones, of which the last is taken next. `installs` counts copies: one installs one record.
    """

    form: RecordFormat
    capacities: Sequence[int]
    experts: int
    device: torch.device
    clock: Clock = field(default_factory=Clock)
    installs: int = 0
    stored: Stored = field(init=False)
    map: Tensor = field(init=False)
    slot: list[list[int]] = field(init=False)
    arena: Tensor = field(init=False)
    _held: HostMemory | None = field(init=False, default=None)
    free: list[list[int]] = field(init=False)
    _stream: torch.cuda.Stream | None = field(init=False, default=None)
    _filled: dict[int, torch.cuda.Event] = field(init=False, default_factory=dict)
    _read: dict[int, torch.cuda.Event] = field(init=False, default_factory=dict)
    _shown: NDArray[np.int32] = field(init=False)
    _rows: list[Tensor] = field(init=False)
    _map_rows: list[Tensor] = field(init=False)
    _slots: list[Tensor] = field(init=False)
    _stale: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        layers, total = len(self.capacities), sum(self.capacities)
        try:
            if self.device.type == "cpu":
                # Page-aligned, so that kernels take the same path wherever an expert lies.
                self._held = allocate(total, self.form.size, pin=False)
                self.arena = self._held.records
            else:
                self.arena = torch.empty(total, self.form.size, dtype=torch.uint8, device=self.device)
        except (torch.OutOfMemoryError, MachineError):
            raise MachineError(
                f"{total} slots of {self.form.size:,} bytes do not fit on the device",
                "give fewer --slots, or a --device-memory that it has",
            ) from None
        if self.device.type != "cpu":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.stored = self.form.stored(self.arena)
        self.slot = [[-1] * self.experts for _ in range(layers)]
        first = 0
        self.free = []
        for capacity in self.capacities:
            self.free.append(list(range(first + capacity - 1, first - 1, -1)))
            first += capacity
        self.map = torch.full((layers, self.experts), -1, dtype=torch.int32, device=self.device)
        # The map as the host has it. A row is copied at once, so it changes only where no copy of it can be under way: when
        # the host has read a later decision, or `show` has waited.
        shown = torch.full(
            (layers, self.experts), -1, dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        self._shown, self._rows = shown.numpy(), list(shown)
        self._map_rows, self._slots = list(self.map), list(self.arena)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self.arena.numel()

    def fill(self, layer: int, fills: Sequence[Fill], host: Host, show: bool = False) -> None:
        """Bring each (expert, victim) of a step into a slot. On a card the copies may still be under way: see `wait_for`.

        `show` writes the layer's row of the device's map at once, which needs that no kernel is still to read it.
        """
        placed = [self._place(layer, expert, victim) for expert, victim in fills]
        keys = [(layer, expert) for expert, _ in fills]
        ready = host.fetch(keys)
        with torch.cuda.stream(self._stream):
            while True:
                with self.clock(READ):
                    following = next(ready, None)
                if following is None:
                    break
                place, record = following
                with self.clock(INSTALL):
                    host.copied(keys[place], self._install(placed[place], record))
        # After the records, which kernels wait for anyway: before them it would keep the bus from them.
        if show:
            self._show(layer)
        else:
            self._stale.add(layer)

    def show(self) -> None:
        """Bring the device's map up to date with all fills so far."""
        if self._stale and self._stream is not None:
            torch.cuda.current_stream(self.device).synchronize()
        for layer in sorted(self._stale):
            self._show(layer)
        self._stale.clear()

    def wait_for(self, layer: int, experts: Sequence[int]) -> None:
        """Kernels issued from now on come after the fills of these experts' slots."""
        for expert in experts:
            over = self._filled.pop(self.slot[layer][expert], None)
            if over is not None:
                self._kernel_waits(over)

    def read(self, layer: int, experts: Sequence[int]) -> None:
        """Kernels issued until now read these experts' slots: no fill of them before those are done."""
        if self._stream is None:
            return
        over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        over.record()
        for expert in experts:
            self._read[self.slot[layer][expert]] = over

    def expert(self, layer: int, expert: int, dtype: torch.dtype) -> Weights:
        """A resident expert's matrices. Raises InternalError for one that is not."""
        slot = self.slot[layer][expert]
        if slot < 0:
            raise InternalError(f"layer {layer}: expert {expert} is not resident")
        return self.stored.expert(slot, dtype)

    def placed(self, layer: int, slots: list[int], free: list[int]) -> None:
        """The device has placed experts by itself: so is its map's row [E] now, and these slots are free."""
        self.slot[layer], self.free[layer] = slots, free
        self._shown[layer] = slots
        self._stale.discard(layer)

    def close(self) -> None:
        """Give the arena back."""
        if self._stream is not None:
            # Not only copies: kernels of a step that was broken off may still read the host's memory, which is unpinned next.
            torch.cuda.synchronize(self.device)
        del self.arena, self._slots, self.stored

    def _place(self, layer: int, expert: int, victim: int | None) -> int:
        slots = self.slot[layer]
        if victim is None:
            slot = self.free[layer].pop()
        else:
            slot, slots[victim] = slots[victim], -1
            self._shown[layer, victim] = -1
        if slot < 0 or slots[expert] >= 0:
            raise InternalError(f"layer {layer}: expert {expert} cannot take the place of {victim}")
        slots[expert] = slot
        self._shown[layer, expert] = slot
        return slot

    def _show(self, layer: int) -> None:
        self._map_rows[layer].copy_(self._rows[layer], non_blocking=True)

    def _install(self, slot: int, record: Tensor) -> torch.cuda.Event | None:
        self.installs += 1
        if self._stream is None:
            self._slots[slot].copy_(record)
            return None
        read = self._read.pop(slot, None)
        if read is not None:
            self._fill_waits(read)
        self._slots[slot].copy_(record, non_blocking=True)
        over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        over.record(self._stream)
        self._filled[slot] = over
        return over

    def _kernel_waits(self, fill: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(fill)

    def _fill_waits(self, kernel: torch.cuda.Event) -> None:
        assert self._stream is not None
        self._stream.wait_event(kernel)
