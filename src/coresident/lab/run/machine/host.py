"""Facts about the host and its Python that cannot change while a run goes: read once a process."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import sys
from pathlib import Path

# Named one by one in the conditions; all others count in one hash together.
# fmt: off
MATTERING = (
    "accelerate", "bitsandbytes", "datasets", "liger-kernel", "numpy", "nvidia-ml-py", "peft", "safetensors",
    "scipy", "tokenizers", "torch", "transformers", "triton", "trl",
)
# fmt: on
_DISTRIBUTION = re.compile(r"^(?P<name>.+?)-(?P<version>[^-]+)(-py[\d.]+)?\.(dist-info|egg-info)$")


@functools.cache
def packages() -> dict[str, str]:
    """Every installed distribution and its version, by normalised name; the first on the path wins, as for
    imports.

    Read from the names of metadata folders: opening each takes ten times as long.
    """
    found: dict[str, str] = {}
    for place in sys.path:
        try:
            names = sorted(entry.name for entry in Path(place or ".").iterdir())
        except OSError:
            continue
        for name in names:
            told = _DISTRIBUTION.match(name)
            if told:
                found.setdefault(re.sub(r"[-_.]+", "-", told["name"]).lower(), told["version"])
    return dict(sorted(found.items()))


@functools.cache
def packages_hash() -> str:
    """One hash of all names and versions."""
    text = "\n".join(f"{name}=={version}" for name, version in packages().items())
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def cpu_flags() -> str:
    """A short hash of the processor's features: they choose which kernels a library runs."""
    text = read("/proc/cpuinfo")
    told = re.search(r"^(flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return hashlib.sha256(" ".join(sorted(told[2].split())).encode()).hexdigest()[:16] if told else "unknown"


def chosen(path: str) -> str:
    """The bracketed choice of a kernel setting such as `always [madvise] never`, else the whole text ("" if
    none)."""
    text = read(path).strip()
    told = re.search(r"\[(.+?)\]", text)
    return told[1] if told else text


def governor() -> str:
    """The frequency governors of all cores, "" where the host shows none."""
    folder = Path("/sys/devices/system/cpu/cpufreq")
    return ",".join(sorted({read(str(path)).strip() for path in folder.glob("policy*/scaling_governor")}))


@functools.cache
def python() -> str:
    """Implementation, version and compiler of this interpreter."""
    return f"{platform.python_implementation()} {platform.python_version()} ({platform.python_compiler()})"


def read(path: str) -> str:
    """A small kernel file's text; "" where it is not there or not readable."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
