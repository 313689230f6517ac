"""Inside a cell: `python -m coresident.lab.run.worker` finds its workload, runs it, reports how it went.

Imports nothing of the lab and nothing heavy: what a cell's process costs is the workload's own.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from coresident.errors import CoresidentError, UserError
from coresident.exhausted import ran_out
from coresident.workload import CELL, Reporter, workload

_LIBRARIES = (
    "torch", "transformers", "peft", "tokenizers", "safetensors", "numpy", "triton", "accelerate", "trl",
    "bitsandbytes",
)  # fmt: skip
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def main() -> int:
    """Run the cell of this process's environment. 0: all done; 1: it failed, and reported why if it could."""
    try:
        cell = Reporter.from_environment()
    except CoresidentError as error:
        print(error, file=sys.stderr)  # noqa: T201 - there is nobody else to tell
        return error.status
    process = os.getpid()
    try:
        cell.environment(_interpreter())
        name = json.loads(Path(os.environ[CELL]).read_text(encoding="utf-8"))["cell"]["workload"]
        chosen = workload(name)
        chosen.run(_parameters(name, chosen.parameters, cell), cell)
        if os.getpid() == process:
            cell.environment(_libraries())
    except KeyboardInterrupt:
        _tell(cell, "failed", "interrupted by SIGINT")
        return _leave(process, 130)
    except BaseException as error:  # noqa: BLE001 - whatever ended the workload is reported, not passed on
        traceback.print_exc()
        _tell(cell, *explain(error))
        return _leave(process, 1)
    if os.getpid() != process:
        # Went on from here, it would report `done` for work that only its parent can vouch for.
        _tell(cell, "failed", "a forked process returned from the workload instead of ending")
        return _leave(process, 1)
    cell.done()
    return 0


def _leave(process: int, status: int) -> int:
    if os.getpid() != process:
        sys.stderr.flush()
        os._exit(status)
    return status


def _tell(cell: Reporter, status: Literal["failed", "oom", "nonfinite"], reason: str) -> None:
    try:
        cell.failed(status, reason)
    except OSError:
        # A full disk is the likely reason; the missing `done` says the rest.
        traceback.print_exc()


def _parameters(name: str, model: Any, cell: Reporter) -> Any:
    try:
        # As JSON: there a list may stand for a tuple, and nothing else is converted.
        return model.model_validate_json(json.dumps(cell.parameters))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{name}: parameter {key!r}: {first['msg']}", "correct the study's parameters"
        ) from None


def explain(error: BaseException) -> tuple[Literal["failed", "oom", "nonfinite"], str]:
    """The status and the sentence for an exception that ended a workload."""
    said = " ".join(str(error).split())[:500]
    kind = type(error).__name__
    if isinstance(error, CoresidentError):
        return "failed", said
    if exhausted := ran_out(error):
        return "oom", f"{kind}: {exhausted[:500]}"
    if isinstance(error, FloatingPointError):
        return "nonfinite", said or kind
    if isinstance(error, SystemExit):
        return "failed", f"the workload ended its process (exit code {error.code}) instead of returning"
    where = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(where[-1].filename).name} line {where[-1].lineno})" if where else ""
    return "failed", f"{kind}: {said}{place}"


def _interpreter() -> dict[str, Any]:
    """What is known before anything of the workload is imported."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "argv": list(sys.orig_argv),
        "hostname": socket.gethostname(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "thread_variables": {name: os.environ[name] for name in _THREADS if name in os.environ},
    }


def _libraries() -> dict[str, Any]:
    """What the workload has imported, and how many threads it computes with."""
    found: dict[str, Any] = {}
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch_threads"] = torch.get_num_threads()
        found["torch_interop_threads"] = torch.get_num_interop_threads()
    return found


if __name__ == "__main__":
    sys.exit(main())
