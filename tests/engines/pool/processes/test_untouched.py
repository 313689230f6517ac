"""A process that a card has been touched in is not forked, whoever touched it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coresident.engines.pool.processes.untouched import OPTIONAL, imports_alone, require_no_device
from coresident.errors import MachineError


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "0").symlink_to("/dev/null")
    return tmp_path / "fd"


def test_an_open_device_file_is_seen(files: Path) -> None:
    require_no_device(files)
    (files / "7").symlink_to("/dev/nvidiactl")
    with pytest.raises(MachineError, match="has opened /dev/nvidiactl in the zygote") as caught:
        require_no_device(files)
    assert "sharing: none" in caught.value.remedy


# A driver that answers as the real one does before (3) and after (0) cuInit.
SOURCE = "int cuDeviceGetCount(int *n) {{ return {0}; }} int cuCtxGetCurrent(void **c) {{ return {0}; }}"


@pytest.mark.parametrize("answer", [3, 0, 100])
def test_a_loaded_driver_is_asked_whether_it_was_started(tmp_path: Path, answer: int) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(SOURCE.format(answer))
    if subprocess.run(["cc", "-shared", "-o", library, source], check=False).returncode:
        pytest.skip("no C compiler here")
    code = (
        f"import ctypes; kept = ctypes.CDLL({str(library)!r})\n"
        "from coresident.engines.pool.processes.untouched import require_no_device; require_no_device()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (answer == 3), done.stderr
    if answer != 3:
        assert "has started the CUDA driver in the zygote" in done.stderr


def test_a_driver_that_cannot_be_asked_counts_as_started(files: Path, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 1 /nowhere/libcuda.so.1\n")
    with pytest.raises(MachineError, match="has started the CUDA driver"):
        require_no_device(files, maps)


def test_while_hidden_nobody_sees_a_card_and_afterwards_all_is_as_before() -> None:
    before = torch.cuda.is_available, torch.cuda.device_count
    with imports_alone():
        assert not torch.cuda.is_available()
        assert torch.cuda.device_count() == 0
    assert (torch.cuda.is_available, torch.cuda.device_count) == before


def test_while_hidden_an_optional_package_is_not_there_and_afterwards_it_is() -> None:
    code = f"""
import importlib.util, sys
from coresident.engines.pool.processes.untouched import imports_alone
with imports_alone():
    assert importlib.util.find_spec("pandas") is None
    try:
        import pandas
    except ImportError:
        print("hidden")
import pandas
assert not [name for name in {OPTIONAL!r} if name in sys.modules and sys.modules[name] is None]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "hidden\n"), done.stderr
