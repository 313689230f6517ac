"""Devices that cells run on: the host's processors, or one whole CUDA card, named by its UUID."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coresident.errors import MachineError, UserError, nearest
from coresident.lab.run.machine.nvml import Card, NoDriver, Nvml, connect


@dataclass(frozen=True)
class Device:
    """Where a cell runs. For the CPU, `uuid` is "cpu" and `memory_total` the host's memory (bytes)."""

    kind: Literal["cpu", "cuda"]
    uuid: str
    name: str
    index: int
    memory_total: int

    def variables(self) -> dict[str, str]:
        """Environment variables that show a cell this device and no other."""
        if self.kind == "cpu":
            return {"CUDA_VISIBLE_DEVICES": ""}
        return {"CUDA_VISIBLE_DEVICES": self.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def resolve(
    text: str, nvml: Nvml | None = None, environment: Mapping[str, str] | None = None
) -> list[Device]:
    """The devices that `text` names: `cpu`, or cards as `0,1`, `cuda`, `cuda:1`, or UUIDs (a unique
    beginning will do).

    Numbers count the cards that CUDA_VISIBLE_DEVICES leaves visible, in nvidia-smi's order (which is CUDA's
    under CUDA_DEVICE_ORDER=PCI_BUS_ID). Raises `UserError` for a name that is no device, `MachineError`
    where the driver or the card cannot be used. No context is created on any card.
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UserError(f"--devices {text!r} names no device", "write `cpu`, or cards such as `0` or `0,1`")
    if names == ["cpu"]:
        return [cpu()]
    if "cpu" in names:
        raise UserError(
            f"--devices {text!r} mixes the CPU with cards", "measure on one kind of device in a run"
        )
    for name in names:
        if not re.fullmatch(r"\d+|cuda(:\d+)?|GPU-[0-9a-fA-F-]+", name):
            raise UserError(f"unknown device {name!r}", _known(name))
    try:
        cards = (nvml or connect()).cards()
    except NoDriver as why:
        raise MachineError(
            f"device {names[0]!r} cannot be used: NVML says {str(why)!r}",
            "use the device cpu, or install NVIDIA's driver",
        ) from None
    shown = visible(cards, os.environ if environment is None else environment)
    found = [_find(name, shown) for name in names]
    for card in found:
        if found.count(card) > 1:
            raise UserError(f"--devices {text!r} names {card.uuid} twice", "name each card once")
        if card.mig:
            raise MachineError(
                f"card {card.uuid} is split into MIG instances",
                "the lab measures whole cards: switch MIG off for it, or use another",
            )
    return [Device("cuda", card.uuid, card.name, card.index, card.memory_total) for card in found]


def visible(cards: list[Card], environment: Mapping[str, str]) -> list[Card]:
    """The cards that CUDA_VISIBLE_DEVICES leaves, in its order; like CUDA, the first unknown entry ends the
    list."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return cards
    shown: list[Card] = []
    for entry in (part.strip() for part in chosen.split(",")):
        matches = [
            card
            for card in cards
            if (entry.isdigit() and card.index == int(entry))
            or (entry.startswith("GPU-") and card.uuid.startswith(entry))
        ]
        if len(matches) != 1:
            break
        shown += matches
    return shown


def cpu() -> Device:
    """The host's processors and memory as a device."""
    return Device("cpu", "cpu", cpu_model(), 0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the kernel tells it, else its architecture."""
    try:
        told = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        told = None
    return told.group(1).strip() if told else platform.machine()


def _find(name: str, cards: list[Card]) -> Card:
    if name.startswith("GPU-"):
        matches = [card for card in cards if card.uuid.lower().startswith(name.lower())]
        if len(matches) == 1:
            return matches[0]
        what = "more than one card begins with" if matches else "no visible card has"
        raise UserError(f"{what} the UUID {name!r}", _listed(cards))
    index = int(name.rpartition(":")[2]) if name != "cuda" else 0
    if index >= len(cards):
        raise UserError(f"there is no card {name!r}", _listed(cards))
    return cards[index]


def _listed(cards: list[Card]) -> str:
    if not cards:
        return "no card is visible here (is CUDA_VISIBLE_DEVICES set?): use the device cpu"
    return "visible: " + "; ".join(f"{place} = {card.uuid} ({card.name})" for place, card in enumerate(cards))


def _known(name: str) -> str:
    near = nearest(name, ["cpu", "cuda", "cuda:0"])
    return near if near.startswith("did") else "write `cpu`, or cards by number or UUID, such as `0,1`"
