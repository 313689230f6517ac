"""Samples one card while a cell runs: memory, energy, power, clocks, throttling, and who else computes on
it.

Memory is the whole card's, less what was in use before the cell: it holds contexts and fragmentation, which
no framework's own counter shows. Energy is the card's counter; it says nothing about the host.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from coresident.lab.run.machine.nvml import MIB, Nvml, Reading, Unreadable

# The counter moves in steps of up to 100 ms: below this window its error shows.
SHORTEST_ENERGY_WINDOW = 5.0
# Some answers take the driver milliseconds.
SLOW_INTERVAL = 0.1


class CardSampler:
    """From its making (the idle card) to `stop`."""

    def __init__(self, nvml: Nvml, uuid: str) -> None:
        self._nvml, self._uuid = nvml, uuid
        self._unreadable = 0
        self._idle = self._memory()
        self._peak = self._idle
        self._idle_power = nvml.reading(uuid).power
        self._energy = nvml.energy(uuid)
        self._readings: list[Reading] = []
        self._throttled: dict[str, int] = {}
        self._foreign: set[int] = set()
        self._own_seen = False
        self._due = 0.0

    def _memory(self) -> float | None:
        try:
            return self._nvml.memory_used(self._uuid) / MIB
        except Unreadable:
            self._unreadable += 1
            return None

    def look(self) -> float | None:
        """MiB in use now (None: unreadable), taken into the peak."""
        used = self._memory()
        if used is not None:
            self._peak = max(used, self._peak or 0.0)
        return used

    def sample(self, cell: Collection[int]) -> dict[str, Any]:
        """One sample, JSON-ready. `cell` are the cell's own processes."""
        used = self.look()
        row: dict[str, Any] = {"used_mib": None if used is None else round(used, 1)}
        now = time.monotonic()
        if now < self._due:
            return row
        self._due = now + SLOW_INTERVAL
        reading = self._nvml.reading(self._uuid)
        self._keep(reading)
        holders = set(self._nvml.holders(self._uuid) or ())
        self._own_seen = self._own_seen or bool(holders & set(cell))
        self._foreign |= holders - set(cell)
        return {
            **row,
            "power_w": reading.power,
            "sm_mhz": reading.sm_clock,
            "memory_mhz": reading.memory_clock,
            "temperature_c": reading.temperature,
            "utilisation": reading.utilisation,
            "throttled": list(reading.throttled),
        }

    def _keep(self, reading: Reading) -> None:
        # A long cell's extremes and mean need no more than this.
        if len(self._readings) >= 20_000:
            self._readings = self._readings[::2]
        self._readings.append(reading)
        for reason in reading.throttled:
            self._throttled[reason] = self._throttled.get(reason, 0) + 1

    def stop(self, window: float) -> dict[str, Any]:
        """The card's part of the summary; `window` is the time in seconds since the making.

        Processes seen on the card that are not the cell's are `foreign_pids` only where the cell's own were
        seen there too: otherwise the driver's numbers are of another pid namespace, or hidden, and nothing
        follows (None).
        """
        summary: dict[str, Any] = {
            "device_idle_mib": _rounded(self._idle),
            "device_peak_used_mib": _rounded(self._peak),
            "peak_device_memory_mib": None,
            "throttled": dict(sorted(self._throttled.items())),
            "power_w": _spread([reading.power for reading in self._readings]),
            "sm_mhz": _spread([reading.sm_clock for reading in self._readings]),
            "memory_mhz": _spread([reading.memory_clock for reading in self._readings]),
            "temperature_c": _spread([reading.temperature for reading in self._readings]),
            "utilisation": _spread([reading.utilisation for reading in self._readings]),
            "foreign_pids": sorted(self._foreign) if self._own_seen else None,
            **self._energy_used(window),
        }
        if self._idle is not None and self._peak is not None and not self._unreadable:
            summary["peak_device_memory_mib"] = round(self._peak - self._idle, 1)
        else:
            summary["peak_device_memory_reason"] = (
                f"the card's memory could not be read {self._unreadable} times"
            )
        return summary

    def _energy_used(self, window: float) -> dict[str, Any]:
        told: dict[str, Any] = {
            "energy_joules": None,
            "energy_net_joules": None,
            "idle_power_w": self._idle_power,
            "energy_note": "the card alone; the host's energy is not measured",
        }
        after = self._nvml.energy(self._uuid)
        if self._energy is None or after is None:
            told["energy_reason"] = "the card has no energy counter"
        elif window < SHORTEST_ENERGY_WINDOW:
            told["energy_reason"] = (
                f"the window of {window:.1f} s is shorter than {SHORTEST_ENERGY_WINDOW:g} s"
            )
        elif after < self._energy:
            told["energy_reason"] = "the counter went back: the driver was reloaded"
        else:
            gross = after - self._energy
            told["energy_joules"] = round(gross, 3)
            if self._idle_power is not None:
                told["energy_net_joules"] = round(gross - self._idle_power * window, 3)
        return told


def _spread(values: list[Any]) -> dict[str, float] | None:
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    return {"least": min(known), "mean": round(sum(known) / len(known), 2), "most": max(known)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
