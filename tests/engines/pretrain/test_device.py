"""What a device computes in, and what is asked of PyTorch for it, before anything is computed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from coresident.engines.pretrain import device
from coresident.engines.pretrain.parameters import Runtime
from coresident.errors import MachineError


def test_a_card_multiplies_in_bfloat16_and_a_cpu_in_float32_unless_told() -> None:
    assert device.precision(Runtime(), "GPU-1") == "bfloat16"
    assert device.precision(Runtime(), "cpu") == "float32"
    assert device.precision(Runtime(precision="float32"), "GPU-1") == "float32"
    assert device.dtype("bfloat16") is torch.bfloat16


def test_determinism_and_threads_take_effect_and_are_read_back() -> None:
    """In a process of its own: these settings last as long as it does."""
    code = (
        "import os\nfrom coresident.engines.pretrain import device\n"
        "from coresident.engines.pretrain.parameters import Runtime\n"
        "place = device.settle(Runtime(deterministic=True, threads=1), 'cpu')\n"
        "import torch\n"
        "print(place, device.deterministic(), torch.get_num_threads(), os.environ['CUBLAS_WORKSPACE_CONFIG'])\n"
        "device.settle(Runtime(), 'cpu')\nprint(device.deterministic())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["cpu", "True", "1", ":4096:8", "False"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_a_card_that_is_not_there_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MachineError, match="no CUDA device can be used"):
        device.settle(Runtime(), "GPU-none")


def test_a_cpu_has_no_peak_that_is_counted() -> None:
    assert device.peak_memory(torch.device("cpu")) is None
    assert device.name(torch.device("cpu")) == "cpu"
