"""Deterministic settings take effect where they must, and are read back."""

from __future__ import annotations

import json
import subprocess
import sys

from coresident.engines.pool.job import Job, device_variables
from coresident.engines.pool.parameters import DPO


def job(**values: object) -> Job:
    parameters = DPO.model_validate(values)
    return Job(parameters=parameters, hold="private", base="", events="", work="", cpus=[], device="GPU-1")


def test_the_environment_has_what_must_be_there_before_a_process_starts() -> None:
    assert device_variables(job(deterministic=True))["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in device_variables(job())
    assert device_variables(job())["CUDA_VISIBLE_DEVICES"] == "GPU-1"


def test_what_took_effect_is_read_back_from_torch() -> None:
    code = "import json; from coresident.engines.pool.card.deterministic import apply; print(json.dumps(apply()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"deterministic": True, "tf32": False, "attention": "math"}
