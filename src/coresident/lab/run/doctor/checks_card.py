"""The doctor's questions about the cards: driver, memory in use, settings, faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coresident.lab.run import preflight
from coresident.lab.run.doctor.finding import Finding, bad, ok, warn
from coresident.lab.run.machine.nvml import MIB, Card, NoDriver, Nvml, Unreadable, connect

# Above this a card is in use, as in a study's clean_device_mib by default.
CLEAN = 500.0


def findings(nvml: Nvml | None = None, device_files: Path = Path("/dev")) -> Iterator[Finding]:
    """All findings about all cards."""
    try:
        driver = nvml or connect()
        cards = driver.cards()
    except NoDriver as why:
        if list(device_files.glob("nvidia[0-9]*")):
            yield bad(
                f"there are NVIDIA device files, but NVML says {str(why)!r}",
                "install libnvidia-ml.so.1 (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
            )
        else:
            yield ok(f"no NVIDIA card to measure on (NVML says {str(why)!r}); --devices cpu works")
        return
    if not cards:
        yield ok("NVML shows no card; --devices cpu works")
    for card in cards:
        yield from _card(driver, card)


def _card(nvml: Nvml, card: Card) -> Iterator[Finding]:
    name = f"card {card.index} ({card.name}, {card.uuid})"
    facts = nvml.facts(card.uuid)
    yield ok(
        f"{name}: {card.memory_total / 2**30:.1f} GiB, driver {facts.get('driver', 'unknown')},"
        f" CUDA {facts.get('cuda', 'unknown')}"
    )
    yield _memory(nvml, card, name)
    if facts.get("mig") == "on":
        yield bad(
            f"{name} is split into MIG instances",
            "the lab measures whole cards: switch MIG off, or use another",
        )
    if facts.get("persistence") == "off":
        yield warn(
            f"{name}: persistence mode is off", "nvidia-smi -pm 1: else the driver reloads before each cell"
        )
    if facts.get("compute_mode") == "2":
        yield bad(f"{name}: compute mode prohibits every process", "nvidia-smi -c 0")
    if facts.get("compute_mode") == "3":
        yield warn(
            f"{name}: compute mode admits one process at a time",
            "nvidia-smi -c 0, or learners cannot share it",
        )
    faults = nvml.faults(card.uuid)
    if faults:
        listed = ", ".join(f"{count} {what}" for what, count in faults.items())
        yield bad(f"{name}: {listed}", "reset or replace the card: its results cannot be trusted")
    throttled = nvml.reading(card.uuid).throttled
    if throttled:
        yield warn(
            f"{name}: clocks are held back now by {', '.join(throttled)}",
            "check power, cooling and set clocks",
        )
    if nvml.energy(card.uuid) is None:
        yield warn(f"{name} has no energy counter", "energy_joules will be missing from its records")


def _memory(nvml: Nvml, card: Card, name: str) -> Finding:
    try:
        used = nvml.memory_used(card.uuid) / MIB
    except Unreadable as why:
        return bad(
            f"{name}: memory in use cannot be read ({why})",
            "the lab refuses to measure on it: update the driver",
        )
    if used > CLEAN:
        return bad(
            f"{name}: {used:.0f} MiB are in use, {preflight.held_by(nvml, card.uuid)}",
            "end what uses it: the lab refuses above 500 MiB (clean_device_mib)",
        )
    return ok(f"{name}: {used:.0f} MiB in use")
