"""What the arm `smolvm` may be told: where its prerequisites are, and what its harness has knobs for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from coresident.workload import Parameters


class Smolvm(Parameters):
    """Paths left out are taken from the harness's own variables (`SMOLVM`, `SMOLVM_LIB_DIR`, `PY_VENV`, `PACK`, `MODEL`,
    `HF_HOME`), then from its defaults.

    `share` sets `SMOLVM_CUDA_FORK_SHARE_WEIGHTS` to 1 (`on`) or 0 (`off`), or leaves it unset. `workload` is the
    training script that the harness copies into each machine (its `bench/workload_dpo.py`), `guest_python` the
    interpreter in the image that runs it. `golden_seconds` and `timeout` limit the load and the training.
    """

    binary: str | None = None
    lib_dir: str | None = None
    python: str | None = None
    pack: str | None = None
    model: str | None = None
    hf_home: str | None = None
    workload: str | None = None
    proto_hash: str | None = None
    rootfs: str | None = None
    guest_python: str = "/home/ubuntu/ptwork/bin/python"
    socket: str = "/tmp/smolvm/cuda-daemon.sock"  # noqa: S108 - where smolvm's client looks for it
    share: Literal["on", "off", "default"] = "default"
    alloc_conf: str = "expandable_segments:True"
    golden_seconds: Annotated[float, Field(gt=0)] = 300.0
    timeout: Annotated[float, Field(gt=0)] = 600.0
