"""Under which conditions a cell was measured, and where: the conditions are hashed and decide what may be
pooled.

Conditions are all that could change a number unasked. What only says where and when (UUIDs, process ids,
times, untracked files, host names) is kept out of them, and is in the environment, to be seen.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import coresident
from coresident import cgroup
from coresident.lab.records.schema import Conditions
from coresident.lab.run.machine import cores, git, hashing, host
from coresident.lab.run.machine.devices import Device, cpu_model
from coresident.lab.run.machine.nvml import NoDriver, Nvml, connect
from coresident.lab.study.cells import digest

# Variables that change how much runs at once, which kernels run, or how memory is had.
# fmt: off
PREFIXES = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_", "CUDA_", "CUBLAS_",
    "CUDNN_", "NVIDIA_TF32_", "NCCL_", "PYTORCH_", "TORCH_", "TRITON_", "TOKENIZERS_", "MALLOC_",
    "LD_PRELOAD", "GLIBC_TUNABLES", "PYTHONHASHSEED", "PYTHONOPTIMIZE",
)
# These say where, not how; or they are set by the lab itself.
PLACES = frozenset((
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH",
    "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "TORCH_HOME", "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
))
# fmt: on
UNLIMITED = "unlimited"


def conditions(
    device: Device,
    workload_name: str,
    argv: Sequence[str],
    inputs: Sequence[Path],
    cwd: Path,
    nvml: Nvml | None = None,
) -> Conditions:
    """All that could change the numbers of `workload_name` on `device` unasked, flat, with its hash.

    For `command`, whose code is not ours, that takes in the files named in `argv` and the state of tracked
    files around `cwd`; for another package's workload, that package's source.
    """
    limits = cgroup.limits()
    values = {
        "coresident": source_hash(),
        "python": host.python(),
        "packages": host.packages_hash(),
        **{f"package.{name}": host.packages()[name] for name in host.MATTERING if name in host.packages()},
        "kernel": platform.release(),
        "libc": "-".join(platform.libc_ver()),
        "cpu": cpu_model(),
        "cpu_flags": host.cpu_flags(),
        "cores": str(len(cores.allowed())),
        "memory_gib": str(round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)),
        "cgroup_cpus": UNLIMITED if limits.cpus is None else f"{limits.cpus:g}",
        "cgroup_memory": UNLIMITED if limits.memory is None else str(limits.memory),
        "governor": host.governor(),
        "hugepages": host.chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "swap": "on" if len(host.read("/proc/swaps").splitlines()) > 1 else "off",
        **_device_values(device, nvml),
        **{f"env.{name}": value for name, value in sorted(variables(os.environ).items())},
        **{f"input.{name}": hashing.of(path) for name, path in _named(inputs)},
    }
    if workload_name == "command":
        values |= {f"file.{name}": hashing.of(path) for name, path in _named(files_of(argv, cwd))}
        found = git.state(cwd)
        values |= {"git": found.why} if found.why else {"git.commit": found.commit, "git.diff": found.diff}
    else:
        values |= _foreign_source(workload_name)
    return Conditions(hash=digest(values), values=values)


def environment(device: Device, inputs: Sequence[Path], cwd: Path) -> dict[str, Any]:
    """What can be seen of this host and this source, for a reader; JSON-ready. `source` says that the lab's
    own process saw it, not the cell's."""
    found = git.state(cwd)
    home = Path(coresident.__file__).parent
    # Installed, it lies in no repository of its own: what git says there would be about another project.
    installed = "site-packages" in home.parts
    ours = git.State(why="installed") if installed else git.state(home)
    limits = cgroup.limits()
    return {
        "source": "host",
        "host": socket.gethostname(),
        "device": {"uuid": device.uuid, "index": device.index, "name": device.name},
        "python": {"executable": sys.executable, "version": platform.python_version()},
        "packages": {name: host.packages()[name] for name in host.MATTERING if name in host.packages()},
        "coresident": {"version": coresident.__version__, **_git_facts(ours, brief=True)},
        "git": _git_facts(found),
        "affinity": cores.allowed(),
        "cgroup": {"cpus": limits.cpus, "memory": limits.memory},
        "inputs": {str(path): hashing.of(path) for path in inputs},
    }


@functools.cache
def source_hash() -> str:
    """Hash of coresident's own Python files, as they are at the first call of this process."""
    return hashing.tree(Path(coresident.__file__).parent, lambda name: name.endswith(".py"))


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those variables that change results or speed, by name."""
    return {
        name: value for name, value in environ.items() if name.startswith(PREFIXES) and name not in PLACES
    }


def files_of(argv: Sequence[str], cwd: Path) -> list[Path]:
    """The files that a command line names: programs found on the path, and words that are files seen from
    `cwd`.

    A word with spaces (a shell's script) is taken apart into its words.
    """
    found: dict[Path, None] = {}
    for word in argv:
        for part in _words(word):
            place = cwd / part
            if _is_file(place):
                found[place] = None
            elif "/" not in part and (program := shutil.which(part)) is not None:
                found[Path(program)] = None
    return sorted(found, key=str)


def _is_file(place: Path) -> bool:
    """Whether a word names a file that can be looked at: a program given in full (`python -c`) is too long to be a name."""
    try:
        return place.is_file()
    except OSError:
        return False


def _words(text: str) -> Iterator[str]:
    yield text
    if any(letter.isspace() for letter in text):
        try:
            yield from shlex.split(text)
        except ValueError:
            yield from text.split()


def _device_values(device: Device, nvml: Nvml | None) -> dict[str, str]:
    values: dict[str, str] = {"device": device.kind}
    if device.kind == "cuda":
        values |= {"device.name": device.name, "device.memory_mib": str(device.memory_total // 2**20)}
        try:
            facts = (nvml or connect()).facts(device.uuid)
        except NoDriver as why:
            facts = {"driver": f"unknown: {why}"}
        values |= {f"device.{name}": value for name, value in facts.items()}
    return values


def _named(paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Paths by their last part, so that the same file in another folder or machine has the same name here."""
    met: dict[str, int] = {}
    for path in paths:
        count = met[path.name] = met.get(path.name, 0) + 1
        yield (path.name if count == 1 else f"{path.name}#{count}"), path


def _foreign_source(workload_name: str) -> dict[str, str]:
    """The source of a workload that another package brings: an editable install's version says nothing of
    its state."""
    for point in entry_points(group="coresident.workloads"):
        package = point.module.partition(".")[0]
        if point.name == workload_name and package != "coresident":
            spec = importlib.util.find_spec(package)
            places = list(spec.submodule_search_locations or ()) if spec else []
            if places:
                return {f"source.{package}": hashing.tree(Path(places[0]), lambda name: name.endswith(".py"))}
            if spec and spec.origin:
                return {f"source.{package}": hashing.of(Path(spec.origin))}
    return {}


def _git_facts(found: git.State, *, brief: bool = False) -> dict[str, Any]:
    if found.why:
        return {"git": found.why}
    facts: dict[str, Any] = {"commit": found.commit, "dirty": found.dirty}
    if not brief:
        facts |= {
            "changed": list(found.changed),
            "untracked": list(found.untracked),
            "untracked_count": found.untracked_count,
        }
    return facts
