"""The one way to an NVIDIA card's facts: by UUID, through NVML, never through a context of our own on the
card.

NVML's index order is not CUDA's, so everything but the listing goes by UUID. `Nvml` says what is asked of a
card, so that a test can stand in for one; `connect` gives the real one, or `NoDriver` where there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

MIB = 2**20


class NoDriver(Exception):  # noqa: N818 - a state of the machine, for the caller to judge
    """No usable NVML here; the message says why, in the driver's own words."""


class Unreadable(Exception):  # noqa: N818 - a state of the card, for the caller to judge
    """The card does not answer this question."""


@dataclass(frozen=True)
class Card:
    """A whole card as NVML lists it: `index` in nvidia-smi's order, memory in bytes, `mig`: split into
    instances."""

    index: int
    uuid: str
    name: str
    memory_total: int
    mig: bool = False


@dataclass(frozen=True)
class Reading:
    """One look at a running card; None where it does not answer.

    Power in watts (instantaneous where the card has it), clocks in MHz, temperature in Celsius, utilisation
    in percent; `throttled` names the active clock-event reasons other than idleness.
    """

    power: float | None = None
    sm_clock: int | None = None
    memory_clock: int | None = None
    temperature: int | None = None
    utilisation: int | None = None
    throttled: tuple[str, ...] = ()


class Nvml(Protocol):
    """What the lab asks of a card. Every method takes the card's UUID."""

    def cards(self) -> list[Card]:
        """All cards that the driver shows."""

    def memory_used(self, uuid: str) -> int:
        """Bytes in use on the whole card, the driver's own reserve left out. Raises `Unreadable`."""

    def holders(self, uuid: str) -> list[int] | None:
        """Ids of processes with a compute context, in the driver's own pid namespace; None: they cannot be
        seen."""

    def energy(self, uuid: str) -> float | None:
        """Joules since the driver was loaded, from the card's counter; None: it has none."""

    def reading(self, uuid: str) -> Reading:
        """Power, clocks, temperature, utilisation and throttling now."""

    def facts(self, uuid: str) -> dict[str, str]:
        """Settings that could change a measurement: driver, CUDA version, power limit, ECC, MIG,
        persistence."""

    def faults(self, uuid: str) -> dict[str, int]:
        """Counts of hardware faults that are not zero: uncorrected memory errors, rows that wait for a
        remap."""


# The names are those of nvidia-smi -q; idleness (bit 0) is no throttling.
EVENT_REASONS = {
    0x2: "applications clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake slowdown",
    0x100: "display clocks setting",
}


def event_reasons(mask: int) -> tuple[str, ...]:
    """Names of the clock-event reasons set in NVML's bit mask.

    >>> event_reasons(0x5)
    ('software power cap',)
    """
    named = [name for bit, name in EVENT_REASONS.items() if mask & bit]
    unknown = mask & ~sum(EVENT_REASONS) & ~1
    return tuple([*named, f"unknown reason {unknown:#x}"] if unknown else named)


class _Driver:
    """The real one, over nvidia-ml-py."""

    def __init__(self, library: Any) -> None:
        self._nvml = library
        self._handle: Callable[[str], Any] = functools.cache(library.nvmlDeviceGetHandleByUUID)

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None where card or driver does not know the question."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None

    def cards(self) -> list[Card]:
        found = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            total = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
            mig = self._ask(self._nvml.nvmlDeviceGetMigMode, handle)
            found.append(
                Card(
                    index=index,
                    uuid=_text(self._nvml.nvmlDeviceGetUUID(handle)),
                    name=_text(self._nvml.nvmlDeviceGetName(handle)),
                    memory_total=0 if total is None else int(total.total),
                    mig=bool(mig and mig[0]),
                )
            )
        return found

    def memory_used(self, uuid: str) -> int:
        # Version 2 keeps apart what the driver reserves for itself (hundreds of MiB on recent cards).
        second = getattr(self._nvml, "nvmlMemory_v2", None)
        try:
            handle = self._handle(uuid)
        except self._nvml.NVMLError as error:
            raise Unreadable(str(error)) from None
        if second is not None:
            told = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle, second)
            if told is not None:
                return int(told.used)
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except self._nvml.NVMLError as error:
            raise Unreadable(str(error)) from None

    def holders(self, uuid: str) -> list[int] | None:
        told = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle(uuid)))
        return None if told is None else sorted({int(process.pid) for process in told})

    def energy(self, uuid: str) -> float | None:
        told = self._ask(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle(uuid)))
        return None if told is None else told / 1000

    def reading(self, uuid: str) -> Reading:
        nvml, ask, handle = self._nvml, self._ask, self._handle(uuid)
        busy = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        mask = ask(reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return Reading(
            power=self._power(handle),
            sm_clock=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            temperature=ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            utilisation=None if busy is None else int(busy.gpu),
            throttled=event_reasons(int(mask or 0)),
        )

    def _power(self, handle: Any) -> float | None:
        # The plain power query is an average over a second on newer cards; this field is not.
        field = getattr(self._nvml, "NVML_FI_DEV_POWER_INSTANT", None)
        told = None if field is None else self._ask(self._nvml.nvmlDeviceGetFieldValues, handle, [field])
        if told is not None and told[0].nvmlReturn == self._nvml.NVML_SUCCESS:
            return int(told[0].value.uiVal) / 1000
        average = self._ask(self._nvml.nvmlDeviceGetPowerUsage, handle)
        return None if average is None else average / 1000

    def facts(self, uuid: str) -> dict[str, str]:
        nvml, ask, handle = self._nvml, self._ask, self._handle(uuid)
        cuda = ask(nvml.nvmlSystemGetCudaDriverVersion)
        limit = ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        ecc, mig = ask(nvml.nvmlDeviceGetEccMode, handle), ask(nvml.nvmlDeviceGetMigMode, handle)
        persistence = ask(nvml.nvmlDeviceGetPersistenceMode, handle)
        mode = ask(nvml.nvmlDeviceGetComputeMode, handle)
        driver = ask(nvml.nvmlSystemGetDriverVersion)
        told = {
            "driver": None if driver is None else _text(driver),
            "cuda": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            "power_limit_w": None if limit is None else f"{limit / 1000:g}",
            "ecc": None if ecc is None else _switch(ecc[0]),
            "mig": None if mig is None else _switch(mig[0]),
            "persistence": None if persistence is None else _switch(persistence),
            "compute_mode": None if mode is None else str(mode),
        }
        return {name: value for name, value in told.items() if value is not None}

    def faults(self, uuid: str) -> dict[str, int]:
        nvml, ask, handle = self._nvml, self._ask, self._handle(uuid)
        errors = ask(
            nvml.nvmlDeviceGetTotalEccErrors,
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
        rows = ask(nvml.nvmlDeviceGetRemappedRows, handle)
        counts = {
            "uncorrected memory errors": int(errors or 0),
            "rows waiting for a remap": int(rows[2]) if rows else 0,
            "failed row remaps": int(rows[3]) if rows else 0,
        }
        return {name: count for name, count in counts.items() if count}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _switch(value: int) -> str:
    return "on" if value else "off"


_connected: list[Nvml] = []


def connect() -> Nvml:
    """The machine's NVML, opened once a process. Raises `NoDriver`, saying why."""
    if not _connected:
        try:
            import pynvml
        except ImportError:
            raise NoDriver("the package nvidia-ml-py is not installed") from None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoDriver(str(error)) from None
        _connected.append(_Driver(pynvml))
    return _connected[0]
