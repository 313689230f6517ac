"""What smolvm's harness needs on the host: found, or refused with what is missing and what to set.

The harness builds and installs nothing, and neither does this. Which binary, shims and hash took part is part of every
record: an aggregate over two builds of smolvm is what its published summary has and this must not.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.peers.smolvm.settings import Smolvm
from coresident.errors import MachineError, UserError

ROOTFS = "~/.local/share/smolvm/agent-rootfs/usr/local/lib/smolvm-cuda"
MODEL = "unsloth/Qwen2.5-7B-bnb-4bit"
SHIM = "libcudart-shim.so"
# A question to a program of smolvm's.
ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class Prerequisites:
    """All paths, each of which is there. `weights` are the model's files in the Hugging Face cache."""

    settings: Smolvm
    binary: Path
    lib_dir: Path
    python: Path
    pack: Path
    workload: Path
    proto_hash: Path
    rootfs: Path
    hf_home: Path
    model: str
    weights: tuple[Path, ...]

    @property
    def variables(self) -> dict[str, str]:
        """The environment of every command of smolvm's."""
        return {**os.environ, "SMOLVM_LIB_DIR": str(self.lib_dir)}


def of(parameters: DPO, environment: Mapping[str, str] = os.environ) -> Prerequisites:
    """The prerequisites that `parameters.smolvm`, the harness's variables or its defaults name.

    Raises UserError for the first that is not there.
    """
    asked = parameters.smolvm or Smolvm()

    def path(key: str, variable: str, default: str, what: str, directory: bool = False) -> Path:
        given = getattr(asked, key) or (environment.get(variable) if variable else None) or default
        found = Path(given).expanduser().absolute()
        if not (found.is_dir() if directory else found.is_file()):
            where = f"smolvm.{key} or the variable {variable}" if variable else f"smolvm.{key}"
            raise UserError(
                f"sharing: smolvm needs {what}, and {found} is not there", f"set {where} to its path"
            )
        return found

    binary = path("binary", "SMOLVM", "~/smolvm/smolvm", "the program smolvm")
    if not os.access(binary, os.X_OK):
        raise UserError(
            f"sharing: smolvm: {binary} may not be executed", f"chmod +x {binary}, or set smolvm.binary"
        )
    hf_home = path("hf_home", "HF_HOME", "~/hf", "a Hugging Face cache with the model", directory=True)
    model = asked.model or environment.get("MODEL") or MODEL
    snapshots = hf_home / "hub" / f"models--{model.replace('/', '--')}" / "snapshots"
    weights = tuple(sorted(snapshots.glob("*/*.safetensors")))
    if not weights:
        raise UserError(
            f"sharing: smolvm needs the model {model}, and {snapshots} holds no safetensors of it",
            "download it into that cache, or set smolvm.model (MODEL) and smolvm.hf_home (HF_HOME)",
        )
    return Prerequisites(
        settings=asked,
        binary=binary,
        lib_dir=path(
            "lib_dir", "SMOLVM_LIB_DIR", "~/smolvm/lib/linux-x86_64", "its library directory", directory=True
        ),
        python=path("python", "PY_VENV", "~/ptwork/bin/python", "the Python whose torch the image has"),
        pack=path("pack", "PACK", "~/qlora-baked.smolmachine", "a machine image with torch, unsloth and trl"),
        workload=path(
            "workload", "", str(binary.parent / "bench" / "workload_dpo.py"), "its bench/workload_dpo.py"
        ),
        proto_hash=path(
            "proto_hash", "", str(binary.parent / "smolvm-cuda-run"), "its program smolvm-cuda-run"
        ),
        rootfs=path("rootfs", "", ROOTFS, "the agent's guest libraries (smolvm-cuda)", directory=True),
        hf_home=hf_home,
        model=model,
        weights=weights,
    )


def check_protocol(found: Prerequisites) -> str:
    """The wire hash on which binary and guest shims agree. Raises MachineError where they do not.

    smolvm itself would end in PROTOCOL MISMATCH, after the golden machine has been started for nothing.
    """
    file = found.rootfs / "proto-hash"
    remedy = (
        f"stage the shims of the same build into {found.rootfs}: {found.proto_hash} --proto-hash > {file}"
    )
    ours = answer([str(found.proto_hash), "--proto-hash"], found)
    if not ours:
        raise MachineError(
            f"{found.proto_hash} --proto-hash says nothing", "set smolvm.proto_hash to a build that does"
        )
    try:
        theirs = file.read_text(encoding="utf-8").strip()
    except OSError:
        raise MachineError(f"the guest shims have no wire hash: {file} cannot be read", remedy) from None
    if ours != theirs:
        raise MachineError(f"the wire hash of smolvm is {ours} and the guest shims' is {theirs}", remedy)
    if not (found.rootfs / SHIM).is_file():
        raise MachineError(f"the guest shim {found.rootfs / SHIM} is not there", remedy)
    return ours


def manifest(found: Prerequisites, wire_hash: str) -> dict[str, str]:
    """What could move a number from one installation to another, for the record."""
    return {
        "smolvm": answer([str(found.binary), "--version"], found),
        "smolvm_binary_md5": md5(found.binary),
        "smolvm_proto_hash": wire_hash,
        "smolvm_shim_md5": md5(found.rootfs / SHIM),
        "smolvm_pack_size": str(found.pack.stat().st_size),
        "smolvm_workload_md5": md5(found.workload),
        "smolvm_torch": answer([str(found.python), "-c", "import torch; print(torch.__version__)"], found),
        "smolvm_model": found.model,
        "smolvm_alloc_conf": found.settings.alloc_conf,
    }


def md5(file: Path) -> str:
    """The digest by which the published results name a build."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "md5").hexdigest()


def answer(argv: list[str], found: Prerequisites) -> str:
    """What a program prints, "" where it fails."""
    try:
        done = subprocess.run(
            argv, env=found.variables, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
