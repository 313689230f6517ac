"""The allocator is told of expandable segments in the process that wants them, beside what the environment tells it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from coresident.engines.pool.card import allocator

# Warnings are errors: a PyTorch that no longer wants to be told so is found out.
TOLD = """
import os
import torch
from coresident.engines.pool.card import allocator

child = os.fork()
if child == 0:
    allocator.expand()
    print(torch._C._accelerator_getAllocatorSettings(), flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": ""}, "expandable_segments:True"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
            "max_split_size_mb:128,expandable_segments:True",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"},
            "a:1,expandable_segments:True",
        ),
    ],
)
def test_what_the_environment_asks_for_stays(environment: dict[str, str], settings: str) -> None:
    assert allocator.settings(environment) == settings


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="this PyTorch does not tell its settings",
)
def test_a_forked_process_has_them_and_its_parent_has_not() -> None:
    told = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", TOLD],
        env=os.environ | {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.splitlines() == [
        "max_split_size_mb:128,expandable_segments:True",
        "max_split_size_mb:128",
    ]
