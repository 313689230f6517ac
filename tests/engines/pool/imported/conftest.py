"""Result files as smolvm's harness writes them, made here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ENV = {"smolvm_version": "smolvm 1.0", "driver": "570", "gpu": "card", "torch": "2.7", "host_cores": 26}


def learner(lid: int, **values: Any) -> dict[str, Any]:
    known = {
        "lid": str(lid),
        "tok_s": 100,
        "train_s": 10.0 + lid,
        "step_ms": 500 + lid,
        "loss0": 0.6931,
        "peak_gb": 6.0,
    }
    return {**known, "lossN": round(0.6 + lid / 100, 4), **values}


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., Path]:
    """Writes a result of two shared clones, with some of it replaced, and returns the directory."""
    directory = tmp_path / "results"
    directory.mkdir()

    def written(stamp: str = "20260724-210000", env: dict[str, Any] | None = None, **values: Any) -> Path:
        whole = {
            "arm": "fork", "n": 2, "steps": 10, "cpus_per_learner": 4, "cold_cache": False, "batch": 2, "maxseq": 256,
            "alloc_conf": "", "share_weights_env": "1", "wall_s": 100.5, "golden_load_s": 60.0, "fork_s": 1.5,
            "peak_gpu_mib": 9000, "learners_done": 2, "learners_expected": 2, "agg_tok_s": 200,
            "learners": [learner(0), learner(1)], "env": {**ENV, **(env or {})}, **values,
        }  # fmt: skip
        # NaN is written bare, as the harness does.
        (directory / f"run_{stamp}_r1.json").write_text(json.dumps(whole))
        return directory

    return written
