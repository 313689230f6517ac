"""The arm `smolvm` against a stand-in that keeps its contract. It has never run on the real thing here."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from coresident.engines.pool import inspection
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.peers.smolvm import harness, machines
from coresident.engines.pool.run import run
from coresident.errors import CoresidentError, MachineError, UserError
from coresident.workload import Reporter

STANDIN = Path(__file__).with_name("smolvm_standin.py")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DPO]]:
    """Parameters of an installation that is complete, in `tmp_path`."""
    state, rootfs, hub = tmp_path / "state", tmp_path / "rootfs", tmp_path / "hf" / "hub"
    snapshot = hub / "models--some--base" / "snapshots" / "abc"
    for place in (state, rootfs, snapshot, tmp_path / "lib"):
        place.mkdir(parents=True)
    for name in ("smolvm", "smolvm-cuda-run"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {STANDIN} "$@"\n')
        program.chmod(0o755)
    for file in (
        tmp_path / "python",
        tmp_path / "pack.smolmachine",
        tmp_path / "work.py",
        rootfs / "libcudart-shim.so",
    ):
        file.write_text("#!/bin/sh\necho 2.7.0+cu126\n")
        file.chmod(0o755)
    (snapshot / "model.safetensors").write_bytes(b"weights")
    (state / "hash").write_text("c5631758382d21af")
    (rootfs / "proto-hash").write_text("c5631758382d21af\n")
    monkeypatch.setenv("STANDIN", str(state))
    for name in ("SMOLVM", "SMOLVM_LIB_DIR", "PY_VENV", "PACK", "MODEL", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))

    def made(parameters: dict[str, Any] | None = None, **values: Any) -> DPO:
        given = {
            "binary": str(tmp_path / "smolvm"), "lib_dir": str(tmp_path / "lib"), "python": str(tmp_path / "python"),
            "pack": str(tmp_path / "pack.smolmachine"), "model": "some/base", "hf_home": str(tmp_path / "hf"),
            "workload": str(tmp_path / "work.py"), "rootfs": str(rootfs), "socket": str(state / "s"),
            "golden_seconds": 3.0, "timeout": 3.0,
        }  # fmt: skip
        asked = {
            "sharing": "smolvm",
            "learners": 3,
            "steps": 4,
            "dtype": "bfloat16",
            "optimizer": "adamw8bit",
            "data": {"source": "arithmetic"},
        }
        return DPO.model_validate({**asked, "smolvm": {**given, **values}, **(parameters or {})})

    yield made
    # Nothing that a test started is to outlive it, also where the code under test failed to see to it.
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(STANDIN) in process.cmdline() and process.environ().get("STANDIN") == str(state):
                process.kill()


def told(place: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in (place / "events").iterdir():
        for line in map(json.loads, file.read_text().splitlines()):
            if line["event"] == "environment":
                found.setdefault("environment", {}).update(line["values"])
            else:
                found.setdefault(line["event"], {})[line.get("name", line.get("id", ""))] = line
    return found


def measured(parameters: DPO, place: Path) -> dict[str, dict[str, Any]]:
    harness.run(parameters, Reporter(events=place / "events", work=place / "work"))
    return told(place)


def calls() -> list[dict[str, Any]]:
    lines = (Path(os.environ["STANDIN"]) / "calls.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def left(known: Sequence[str] = ()) -> list[str]:
    """Machines and processes of the stand-in that are still there, once no more than those `known` to stay are."""
    deadline = time.monotonic() + 2
    while True:
        found = [file.name for file in (Path(os.environ["STANDIN"]) / "machines").glob("*")]
        for process in psutil.process_iter():
            try:
                if str(STANDIN) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found += [" ".join(process.cmdline()[2:])] * (
                        process.environ().get("STANDIN") == os.environ["STANDIN"]
                    )
            except psutil.Error:
                continue
        if sorted(found) == sorted(known) or time.monotonic() > deadline:
            return sorted(found)
        time.sleep(0.02)


def test_a_pool_is_driven_as_its_harness_does(settings: Any, tmp_path: Path) -> None:
    events = measured(settings(share="on"), tmp_path)
    said = [call["words"] for call in calls()]
    commands = [[*words[1:2], words[words.index("--name") + 1]] for words in said if "--name" in words]
    assert commands == [
        ["create", "coresident-g"], ["start", "coresident-g"],
        *[["fork", f"coresident-g-c{number}"] for number in range(3)], ["rm", "coresident-g"],
    ]  # fmt: skip
    create = next(words for words in said if words[:2] == ["machine", "create"])
    coordination = tmp_path / "work" / "coord"
    assert create[2:-2] == [
        "--name", "coresident-g", "--cuda", "--net", "-v", f"{coordination}:/opt/coord:rw",
        "--from", str(tmp_path / "pack.smolmachine"), "--storage", "30", "--overlay", "20", "--", "sh",
    ]  # fmt: skip
    script = create[-1]
    for part in (
        "STEPS=4",
        "NSLOTS=3",
        "MODEL=some/base",
        "BATCH=2",
        "MAXSEQ=256",
        "COORD=/opt/coord",
        "FORK=1",
    ):
        assert f" {part} " in script.replace(";", " ")
    assert script.endswith("/home/ubuntu/ptwork/bin/python /opt/coord/dpo_train.py 2>>/opt/coord/g.err")
    daemon = next(call for call in calls() if call["words"][0] == "_cuda-daemon")
    assert daemon["variables"] == {
        "SMOLVM_CUDA_FORK_WORKERS": "1", "SMOLVM_CUDA_FORK_ISOLATE": "1", "SMOLVM_CUDA_DAEMON_IDLE_SECS": "0",
        "SMOLVM_CUDA_FORK_SHARE_WEIGHTS": "1", "SMOLVM_LIB_DIR": str(tmp_path / "lib"),
        "RUST_LOG": "warn,smolvm::cuda_daemon=info",
    }  # fmt: skip
    assert left() == []

    metrics = {name: line["value"] for name, line in events["metric"].items()}
    assert metrics["learners_done"] == 3
    assert 0 < metrics["base_ready_seconds"] < 60
    assert "first_step_seconds" not in metrics, "its clones say when they begin, and not when a step is done"
    assert metrics["step_ms"] == 25
    assert metrics["last_loss"] == pytest.approx(0.61)
    assert metrics["padded_tokens_per_second"] == pytest.approx(256 * metrics["pairs_per_second"])
    assert "tokens_per_second" not in metrics, "its script does not say how many of them are real"
    assert events["series"]["learner-2.first_and_last_loss"]["values"] == [0.6931, 0.62]
    assert {name: line["work"] for name, line in events["worker"].items()} == {
        f"learner-{n}": 8 for n in range(3)
    }
    environment = events["environment"]
    assert environment["smolvm_golden_load_seconds"] == 1.5
    assert environment["smolvm"] == "smolvm 0.0.1-standin"
    assert environment["smolvm_proto_hash"] == "c5631758382d21af"
    assert environment["smolvm_torch"] == "2.7.0+cu126"
    assert len(environment["smolvm_binary_md5"]) == len(environment["smolvm_shim_md5"]) == 32


@pytest.mark.parametrize(
    ("share", "fault", "variable", "passed", "said"),
    [
        ("on", "", "1", True, ""),
        ("off", "", "0", True, ""),
        ("default", "", None, True, ""),
        (
            "on",
            "nothing shared",
            "1",
            False,
            "sharing did not engage: 0 ranges were shared, 200 were private",
        ),
        ("off", "always shares", "0", False, "copies were asked for, and 196 ranges were shared"),
    ],
)
def test_the_share_mode_that_ran_is_a_control(
    settings: Any,
    tmp_path: Path,
    monkeypatch: Any,
    share: str,
    fault: str,
    variable: str | None,
    passed: bool,
    said: str,
) -> None:
    monkeypatch.setenv("STANDIN_FAULT", fault)
    control = measured(settings({"learners": 1}, share=share), tmp_path)["control"]["sharing-engaged"]
    assert (control["asked"], control["passed"], control["reason"]) == (share, passed, said)
    daemon = next(call for call in calls() if call["words"][0] == "_cuda-daemon")
    assert daemon["variables"].get("SMOLVM_CUDA_FORK_SHARE_WEIGHTS") == variable


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        (
            "fork fails",
            MachineError,
            "clone 1 could not be forked: error: snapshot of the golden failed: no space",
        ),
        ("golden fails", MachineError, "the golden machine was not ready within 0.5 s .*PROTOCOL MISMATCH"),
        (
            "clone silent",
            MachineError,
            "2 of 3 learners were done within 0.5 s: learner 1 began and did not end",
        ),
        ("daemon dies", MachineError, "smolvm's daemon ended with status 3 .*CUDA error: device-side assert"),
        ("no daemon", MachineError, "smolvm's daemon ended with status 4 .*no CUDA device"),
        ("nan learner", FloatingPointError, "learner 0: the loss is not finite"),
    ],
)
def test_a_fault_is_named_and_leaves_nothing(
    settings: Any, tmp_path: Path, monkeypatch: Any, fault: str, kind: type[Exception], said: str
) -> None:
    monkeypatch.setenv("STANDIN_FAULT", fault)
    quick = {"clone silent": {"timeout": 0.5}, "golden fails": {"golden_seconds": 0.5}}.get(fault, {})
    with pytest.raises(kind, match=said):
        measured(settings(**quick), tmp_path)
    assert "metric" not in told(tmp_path)
    assert left() == []
    if fault == "nan learner":
        assert told(tmp_path)["series"]["learner-0.first_and_last_loss"]["values"] == [None, None]


DRIVER = """
import sys
from pathlib import Path
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.peers.smolvm import harness
from coresident.workload import Reporter
place = Path(sys.argv[2])
harness.run(DPO.model_validate_json(sys.argv[1]), Reporter(events=place / "events", work=place / "work"))
"""


def test_a_run_that_is_told_to_end_leaves_nothing(settings: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("STANDIN_FAULT", "clone silent")
    asked = settings(timeout=60.0).model_dump_json()
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, asked, str(tmp_path)])
    deadline = time.monotonic() + 30
    while not (tmp_path / "work" / "coord" / "claim_1").exists():
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.terminate()
    assert driver.wait(30) == 143
    assert left() == []


def test_shims_of_another_build_are_caught_before_anything_starts(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "rootfs" / "proto-hash").write_text("afe482be004b7c1f")
    with pytest.raises(
        MachineError, match="hash of smolvm is c5631758382d21af and the guest shims' is afe482be"
    ) as caught:
        measured(settings(), tmp_path)
    assert "--proto-hash >" in caught.value.remedy
    assert [call["words"] for call in calls()] == [["--proto-hash"]]


def test_only_machines_of_its_own_are_removed(settings: Any, tmp_path: Path) -> None:
    place = tmp_path / "state" / "machines"
    place.mkdir()
    for name in ("coresident-g-c7", "bench-g", "mine"):
        (place / f"{name}.json").write_text(json.dumps({"pids": []}))
    measured(settings({"learners": 1}), tmp_path)
    assert left(known=("bench-g.json", "mine.json")) == ["bench-g.json", "mine.json"]


def test_a_daemon_of_somebody_else_is_left_alone(settings: Any, tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "state" / "s"))
        other.listen()
        with pytest.raises(MachineError, match="another smolvm daemon listens"):
            measured(settings(), tmp_path)


@pytest.mark.parametrize(
    ("key", "variable", "what"),
    [
        ("binary", "SMOLVM", "the program smolvm"),
        ("lib_dir", "SMOLVM_LIB_DIR", "library directory"),
        ("python", "PY_VENV", "Python"),
        ("pack", "PACK", "machine image"),
        ("hf_home", "HF_HOME", "Hugging Face cache"),
        ("model", "MODEL", "the model no/where"),
        ("workload", "", "workload_dpo.py"),
        ("rootfs", "", "guest libraries"),
        ("proto_hash", "", "smolvm-cuda-run"),
    ],
)
def test_a_missing_prerequisite_is_named_with_what_to_set(
    settings: Any, key: str, variable: str, what: str
) -> None:
    with pytest.raises(UserError, match=f"^sharing: smolvm needs .*{what}") as refused:
        inspection.inspect(settings(**{key: "no/where"}))
    assert f"smolvm.{key}" in refused.value.remedy
    assert variable in refused.value.remedy


def test_paths_come_from_the_harness_s_variables_too(settings: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACK", str(tmp_path / "pack.smolmachine"))
    needs = inspection.inspect(settings(pack=None))
    assert needs.workers == 3
    assert tmp_path / "smolvm" in needs.inputs


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"rank": 8}, r"its own script's rank \(16\), not 8"),
        ({"optimizer": "adamw"}, r"its own script's optimizer \(adamw8bit\), not adamw"),
        ({"dtype": "float32"}, r"its own script's dtype \(bfloat16\), not float32"),
        ({"data": {"source": "python-docs"}}, "its own arithmetic pairs"),
        ({"loss": "sft"}, "does not know loss: sft"),
        ({"mps": "on"}, "without MPS"),
        ({"own": [{"rank": 8}]}, "has no own"),
        ({"passes": 1}, "has no passes"),
        ({"sharing": "none"}, "smolvm is set and sharing is none"),
    ],
)
def test_what_its_script_would_not_do_is_refused(settings: Any, asked: dict[str, Any], named: str) -> None:
    with pytest.raises(CoresidentError, match=named):
        inspection.inspect(settings(asked))


def test_it_runs_on_a_card_only(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="remotes a CUDA device"):
        run(settings(), Reporter(events=tmp_path / "events", work=tmp_path / "work"))


def test_settings_of_smolvm_leave_other_cells_as_they_are() -> None:
    assert "smolvm" not in DPO().model_dump(mode="json")
    assert machines.PREFIX == "coresident-"


STUDY = """\
study: beside
question: Is native faster than smolvm?
workload: pool.dpo
parameters: {dtype: bfloat16, optimizer: adamw8bit, data: {source: arithmetic}}
arms:
  native: {sharing: none}
  smolvm: {sharing: smolvm, smolvm: {binary: no/where}}
"""


def test_a_study_with_a_missing_prerequisite_writes_nothing(place: Path, coresident: Any) -> None:
    (place / "beside.yaml").write_text(STUDY)
    done = coresident("run", "beside.yaml")
    assert done.status == 2
    assert "sharing: smolvm needs the program smolvm" in done.err
    assert "smolvm.binary or the variable SMOLVM" in done.err
    assert not (place / "runs").exists()
