"""What every process of one pool is told at its start: the same file for all of them, so that arms differ in
nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from coresident.engines.pool.base.base import BaseDir
from coresident.engines.pool.base.tensors import ALIGNMENT, DEVICE_ALIGNMENT, Layout
from coresident.engines.pool.card import deterministic
from coresident.engines.pool.card.device_rules import CPU
from coresident.engines.pool.parameters import DPO

Hold = Literal["private", "mapped", "arena", "arena-copy"]
HOLDS: dict[str, Hold] = {
    "none": "private",
    "mapped": "mapped",
    "fork": "arena",
    "fork-copy": "arena-copy",
    "packed": "private",
    # TRL loads as it does.
    "trl": "private",
}

# Libraries make thread pools when they are imported; each would be a pool a learner, and would make forking
# unsafe.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_COUNTED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Job(BaseModel):
    """One pool run. `hold` is how learners really hold the base; `parameters.sharing` is what was asked. `device`
    is `cpu` or a card's UUID.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    parameters: DPO
    hold: Hold
    base: str
    events: str
    work: str
    cpus: list[list[int]]
    device: str = CPU

    @property
    def on_card(self) -> bool:
        """Whether learners compute on a card."""
        return self.device != CPU

    @property
    def from_arena(self) -> bool:
        """Whether a golden process loads the base for all."""
        return self.hold in ("arena", "arena-copy")

    def layout(self, directory: BaseDir) -> Layout:
        """Where the base's tensors lie in one allocation, the same in every process and arm."""
        alignment = DEVICE_ALIGNMENT if self.on_card else ALIGNMENT
        return directory.layout(self.parameters.dtype, alignment)

    def cores(self, learner: int) -> list[int]:
        """The cores learner `learner` is pinned to; none if it is not pinned. Solo learners take turns on the
        same ones.
        """
        if not self.cpus:
            return []
        return (
            self.cpus[learner % len(self.cpus)] if self.parameters.schedule == "solo" else self.cpus[learner]
        )

    def save(self) -> Path:
        """Write the job where its processes find it."""
        file = Path(self.work) / "job.json"
        file.write_text(self.model_dump_json(), encoding="utf-8")
        return file

    @classmethod
    def load(cls, file: str) -> Job:
        """The job that `save` wrote."""
        return cls.model_validate_json(Path(file).read_text(encoding="utf-8"))


def variables(threads: int) -> dict[str, str]:
    """The environment of every pool process, the same in every arm. `threads` are those of one learner's
    kernels.
    """
    return {
        **os.environ,
        **dict.fromkeys(_ONE_THREAD, "1"),
        **dict.fromkeys(_COUNTED, str(threads)),
        "TOKENIZERS_PARALLELISM": "false",
        # A base is local: a look-up on the network would make an arm wait for something that is not measured.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def device_variables(job: Job) -> dict[str, str]:
    """What the environment of every pool process has besides, for the job's device."""
    wanted = dict(deterministic.VARIABLES) if job.parameters.deterministic else {}
    if job.on_card:
        # Kernels are loaded when they are first used: loading all of them takes each process seconds.
        wanted |= {"CUDA_VISIBLE_DEVICES": job.device, "CUDA_MODULE_LOADING": "LAZY"}
    return wanted


def pin(cores: Sequence[int]) -> list[int]:
    """Restrict this process to `cores` (none: leave it alone) and return what it may use now, read back."""
    if cores:
        os.sched_setaffinity(0, cores)
    return sorted(os.sched_getaffinity(0))
