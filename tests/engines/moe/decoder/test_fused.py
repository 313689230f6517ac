"""The fused step, its kernels interpreted: what the plain step computes, and the same bits however few slots there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coresident.engines.moe import assemble
from coresident.engines.moe.parameters import Decode
from coresident.errors import UserError


@pytest.mark.slow
def test_the_fused_step_is_the_plain_step_whatever_is_resident() -> None:
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    told = json.loads(ran.stdout)
    assert [one["case"] for one in told] == ["olmoe q4", "qwen3_moe stored"]
    for one in told:
        assert one["plain"] < 1e-5 and one["alone"] < 1e-5, one
        assert one["few"], one
        whole, few, alone = one["installs"]
        assert whole == 0 and few > 0 and alone > 0, one
        assert one["filled_by"] == ["host", "host", "device"], one
        assert one["unattended"] and one["books"] == [[True] * 5], one


def test_fused_kernels_are_for_a_card() -> None:
    import torch

    asked = Decode.model_validate({"model": {"config": "tiny"}, "kernels": "fused"})
    with pytest.raises(UserError, match="fused kernels need a card"):
        assemble.build(asked, assemble.open_model(asked.model), torch.device("cpu"), 20, 1)
