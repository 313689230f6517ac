"""`pretrain.train` in a lab's cell: what is reported, and that an interrupted cell goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.pretrain import cell
from coresident.engines.pretrain.directory import METRICS, lines
from coresident.engines.pretrain.inspection import inspect
from coresident.engines.pretrain.parameters import Train
from coresident.engines.pretrain.workload import METRICS as DECLARED
from coresident.errors import MachineError, UserError
from coresident.text.cache import TokenCache
from coresident.workload import Reporter, workload

STUDY = """\
study: small
question: Does it train?
workload: pretrain.train
parameters:
  shape: {vocabulary: 300, layers: 1, width: 16, heads: 2, feedforward: 24, context: 16}
  data: {cache_dir: CACHE}
  batch_tokens: 64
  microbatch: 4
  budget: {updates: 80, virtual_epochs: 2}
  checkpoints: {policy: interval, every: 5}
  runtime: {threads: 1, log_every: 5}
arms:
  plain: {}
repetitions: {min: 1}
controls: [finite, attention-kernel, deterministic, compiled]
hypotheses:
  learns:
    claim: the last loss is below a uniform guess
    metric: validation_loss
    compare: {arm: plain}
    expect: {value: {at_most: 5.0}}
"""


def reported(place: Path) -> dict[str, Any]:
    """A cell's events by kind and name."""
    found: dict[str, Any] = {}
    for file in (place / "events").glob("*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            found.setdefault(line["event"], {})[line.get("name")] = line
    return found


def test_it_is_found_and_says_that_it_goes_on(settings: Callable[..., Train]) -> None:
    found = workload("pretrain.train")
    assert found.resumable
    assert found.parameters is Train
    needs = found.inspect(settings())
    assert needs.on_card > 0 and [one.name for one in needs.inputs] == ["manifest.json"]


def test_bad_input_is_found_before_anything_runs(settings: Callable[..., Train], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a token cache"):
        inspect(settings(data={"cache_dir": str(tmp_path)}))
    with pytest.raises(UserError, match="table only 200"):
        inspect(settings(shape__vocabulary=200))
    with pytest.raises(UserError, match="batch_tokens"):
        inspect(settings(batch_tokens=63))


def test_what_a_cell_reports(settings: Callable[..., Train], tmp_path: Path) -> None:
    cell.run(settings(), Reporter(events=tmp_path / "events", work=tmp_path / "work"))
    told = reported(tmp_path)
    units = {one.name: one.unit for one in DECLARED}
    assert told["metric"].keys() == units.keys() - {"mfu", "device_peak_mib"}
    assert all(one["unit"] == units[name] for name, one in told["metric"].items())
    cumulative = {name for name, one in told["metric"].items() if one["scope"] == "cumulative"}
    assert cumulative == {"updates", "targets", "training_seconds", "elapsed_seconds"}
    values = {name: one["value"] for name, one in told["metric"].items()}
    assert values["below_unigram"] == pytest.approx(values["unigram_loss"] - values["validation_loss"])
    assert values["unigram_loss"] < 5.7
    assert len(told["series"]["loss"]["values"]) == 40
    assert len(told["digest"]["weights"]["value"]) == 64
    assert {name: one["passed"] for name, one in told["control"].items()} == dict.fromkeys(
        ("attention-kernel", "deterministic", "compiled"), True
    )
    assert told["environment"][None]["values"]["mfu"] is None
    assert "not known" in told["environment"][None]["values"]["mfu_reason"]


def test_a_control_fails_where_another_kernel_ran(
    settings: Callable[..., Train], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coresident.engines.pretrain import training

    monkeypatch.setattr(training, "dispatched", lambda *_: "math")
    cell.run(
        settings(runtime__sdpa_backend="reference"),
        Reporter(events=tmp_path / "events", work=tmp_path / "work"),
    )
    assert reported(tmp_path)["control"]["attention-kernel"]["passed"] is False


def test_another_generation_of_the_block_measures_anew(
    settings: Callable[..., Train], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = tmp_path / "cell.json"
    monkeypatch.setenv("CORESIDENT_CELL", str(described))
    for generation in (0, 1):
        described.write_text(json.dumps({"generation": generation}))
        cell.run(settings(), Reporter(events=tmp_path / str(generation) / "events", work=tmp_path / "work"))
        assert reported(tmp_path / str(generation))["metric"]["tokens_per_second"]["value"] > 0


def test_what_is_stopped_is_no_result(
    settings: Callable[..., Train], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coresident.engines.pretrain import training

    plain = training.update

    def stopping(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(*given)

    monkeypatch.setattr(training, "update", stopping)
    with pytest.raises(MachineError, match="told to stop after update 1"):
        cell.run(settings(), Reporter(events=tmp_path / "events", work=tmp_path / "work"))
    assert "metric" not in reported(tmp_path)


def test_an_interrupted_cell_goes_on_from_its_checkpoint_and_its_record_says_so(
    coresident: Callable[..., Any], cache: TokenCache, place: Path
) -> None:
    (place / "small.yaml").write_text(STUDY.replace("CACHE", str(cache.path)))
    argv = [sys.executable, "-m", "coresident", "run", "small.yaml", "--out", "run"]
    process = subprocess.Popen(argv, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 90
    found: list[Path] = []
    while time.monotonic() < until and not (found and len(lines(found[0])) > 30):
        time.sleep(0.02)
        found = list(place.glob(f"run/cells/*/r*/*/g0/{METRICS}"))
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    told = coresident("run", "small.yaml", "--out", "run", "--json")
    assert told.status in (0, 3), told.err
    first, second = sorted(
        (json.loads(file.read_text()) for file in place.glob("run/records/*.json")),
        key=lambda one: one["attempt"],
    )
    assert (first["status"], second["status"]) == ("interrupted", "ok")
    assert second["continues"] == [f"{second['cell']['id']}-r0-a{first['attempt']}"]
    assert second["block"]["generation"] == first["block"]["generation"], (
        first["conditions"],
        second["conditions"],
    )
    metrics = second["metrics"]
    assert (metrics["updates"]["value"], metrics["updates"]["scope"]) == (80, "cumulative")
    assert metrics["training_seconds"]["scope"] == "cumulative"
    assert metrics["tokens_per_second"]["scope"] == "session"
    updates = [row["update"] for row in lines(found[0]) if "loss" in row]
    assert updates == list(range(1, 81))
    assert second["series"]["loss"]["length"] == 80
