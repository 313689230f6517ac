"""Stands in for smolvm and smolvm-cuda-run where neither can run: the same words, files and log lines, and its faults.

Machines are processes that do nothing but keep to the coordination files. `$STANDIN` is where it keeps its state, and
`$STANDIN_FAULT` names the fault it is to have. Every call is noted in `calls.jsonl` with the variables it was given.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

STATE = Path(os.environ["STANDIN"])
FAULT = os.environ.get("STANDIN_FAULT", "")
MACHINES = STATE / "machines"


def main(words: list[str]) -> int:
    with (STATE / "calls.jsonl").open("a") as calls:
        given = {name: value for name, value in os.environ.items() if name.startswith(("SMOLVM", "RUST_LOG"))}
        calls.write(json.dumps({"words": words, "variables": given}) + "\n")
    match words:
        case ["--version"]:
            print("smolvm 0.0.1-standin")
        case ["--proto-hash"]:
            print((STATE / "hash").read_text())
        case ["_cuda-daemon", path]:
            return serve(path)
        case ["_golden", name]:
            load(name)
        case ["_clone", name, golden]:
            train(name, golden)
        case ["machine", what, *rest]:
            return machine(what, rest)
        case _:
            return 2
    return 0


def serve(path: str) -> int:
    """The daemon: listens, and logs what each clone shared."""
    if os.environ.get("SMOLVM_CUDA_FORK_WORKERS") != "1" or os.environ.get("SMOLVM_CUDA_FORK_ISOLATE") != "1":
        print("workers are off", flush=True)
        return 2
    if FAULT == "no daemon":
        print("no CUDA device", flush=True)
        return 4
    shares = os.environ.get("SMOLVM_CUDA_FORK_SHARE_WEIGHTS", "1") == "1"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    seen = 0
    while True:
        time.sleep(0.01)
        forked = sum("-c" in one.name for one in MACHINES.glob("*.json"))
        for _ in range(seen, forked):
            shared = 196 if (shares and FAULT != "nothing shared") or FAULT == "always shares" else 0
            print(
                f"INFO smolvm::cuda_daemon: M2: shared weight ranges shared={shared} private={200 - shared}",
                flush=True,
            )
        seen = forked
        if FAULT == "daemon dies" and list(STATE.glob("coord/claim_*")):
            print("CUDA error: device-side assert", flush=True)
            return 3


def machine(what: str, words: list[str]) -> int:
    given = dict(pairwise(words))
    name = given.get("--name", "")
    match what:
        case "create":
            script = words[-1]
            coordination = given["-v"].split(":")[0]
            assert {"--cuda", "--net", "--from", "--storage", "--overlay"} <= set(words)
            assert Path(given["--from"]).is_file()
            put(name, {"coordination": coordination, "script": script, "pids": []})
        case "start":
            assert "--forkable" in words
            assert os.environ["SMOLVM_CUDA_SHARED"] == "1"
            spawn(name, "_golden", name)
        case "fork":
            assert "--share-weights" in words
            if FAULT == "fork fails" and name.endswith("-c1"):
                print("error: snapshot of the golden failed: no space", file=sys.stderr)
                return 1
            golden = given["--golden"]
            put(name, {**get(golden), "pids": []})
            spawn(name, "_clone", name, golden)
        case "rm":
            for file in MACHINES.glob(f"{name}*.json" if "--cascade" in words else f"{name}.json"):
                for pid in json.loads(file.read_text())["pids"]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                file.unlink()
        case "list":
            print("NAME STATE")
            for file in sorted(MACHINES.glob("*.json")):
                print(file.stem, "running")
    return 0


def get(name: str) -> dict[str, object]:
    return dict(json.loads((MACHINES / f"{name}.json").read_text()))


def put(name: str, value: dict[str, object]) -> None:
    MACHINES.mkdir(exist_ok=True)
    (MACHINES / f"{name}.json").write_text(json.dumps(value))


def spawn(name: str, *words: str) -> None:
    process = subprocess.Popen(
        [sys.executable, __file__, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    put(name, {**get(name), "pids": [process.pid]})


def load(name: str) -> None:
    """The golden machine: loads, says so, and stays."""
    told = get(name)
    coordination = Path(str(told["coordination"]))
    (STATE / "coord").symlink_to(coordination)
    assert (coordination / "dpo_train.py").is_file()
    if FAULT == "golden fails":
        (coordination / "g.err").write_text("PROTOCOL MISMATCH: client wire hash 1 != server 2\n")
        return
    (coordination / "golden_ready").write_text("1500")
    time.sleep(60)


def train(name: str, golden: str) -> None:
    """A clone: takes a number when told to go, and reports as the published script does."""
    told = get(golden)
    coordination = Path(str(told["coordination"]))
    values = dict(re.findall(r"(\w+)=(\S+)", str(told["script"])))
    while not (coordination / "go").exists():
        time.sleep(0.005)
    for number in range(int(values["NSLOTS"])):
        with contextlib.suppress(FileExistsError):
            os.close(os.open(coordination / f"claim_{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
    else:
        return
    silent = FAULT in ("clone silent", "daemon dies") and number == 1
    with (coordination / f"learner_{number}.jsonl").open("a") as out:
        out.write(json.dumps({"lid": str(number), "event": "ready", "load_ms": 1500}) + "\n")
        out.flush()
        if silent:
            time.sleep(60)
        time.sleep(0.1)
        bad = FAULT == "nan learner" and number == 0
        steps = int(values["STEPS"])
        told = {
            "event": "done", "train_s": 0.1, "tok_s": 99, "step_ms": 100 / steps, "peak_gb": 6.41,
            "loss0": float("nan") if bad else 0.6931, "lossN": float("nan") if bad else 0.6 + number / 100,
        }  # fmt: skip
        out.write(json.dumps({"lid": str(number), **told}) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
