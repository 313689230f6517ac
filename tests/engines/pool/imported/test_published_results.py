"""Published results as records: what their own summary passes over is a status or a control here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.pool.imported.smolvm import results, smolvm
from coresident.errors import UserError
from coresident.importing import Imported, importer
from coresident.lab.records import query
from coresident.lab.records.imported import bring
from coresident.lab.records.schema import Record
from coresident.lab.records.store import Store

Publish = Callable[..., Path]
NAN = math.nan


def learners(*losses: float, **values: Any) -> list[dict[str, Any]]:
    """Learners 0, 1, ... that ended at these losses."""
    known = {"tok_s": 100, "train_s": 10.0, "step_ms": 500, "loss0": 0.6931, "peak_gb": 6.0}
    return [{**known, "lid": str(lid), "lossN": loss, **values} for lid, loss in enumerate(losses)]


def only(directory: Path) -> Imported:
    (one,) = results(directory)
    return one


def controls(one: Imported) -> dict[str, tuple[bool | None, str]]:
    return {control.name: (control.passed, control.reason) for control in one.controls}


def test_a_good_result_says_what_was_asked_seen_and_had_around_it(publish: Publish) -> None:
    one = only(publish())
    assert (one.arm, one.status, one.reason) == ("fork", "ok", "")
    assert one.factors == {"learners": 2, "steps": 10, "share": "on"}
    assert one.parameters["page_cache"] == "warm"
    assert one.conditions["driver"] == "570"
    assert one.started == "2026-07-24T21:00:00+00:00"
    assert one.metrics["pairs_per_second"] == (10 * 2 * 2 / 11.0, "1/s")
    assert one.metrics["padded_tokens_per_second"][0] == pytest.approx(256 * 40 / 11)
    assert one.metrics["summed_padded_tokens_per_second"] == (200.0, "1/s")
    assert "tokens_per_second" not in one.metrics, "its tokens are mostly padding"
    assert one.series["learner-1.first_and_last_loss"] == [0.6931, 0.61]
    assert controls(one)["sharing-engaged"] == (True, "")
    assert controls(one)["finite"] == (True, "")


def test_bare_nan_is_read_and_its_learner_is_not_done(publish: Publish) -> None:
    directory = publish(learners=learners(0.6, NAN, loss0=0.69)[:1] + learners(0.6, NAN, loss0=NAN)[1:])
    assert "NaN" in next(directory.glob("*.json")).read_text()
    one = only(directory)
    assert (one.status, one.reason) == ("nonfinite", "the loss of learner 1 is not finite")
    assert one.metrics["learners_done"] == (1.0, "1")
    assert one.series["learner-1.first_and_last_loss"] == [None, None]
    assert controls(one)["finite"][0] is False
    assert "last_loss" not in one.metrics, "a mean over those that are left is not the pool's"
    assert "pairs_per_second" not in one.metrics


def test_a_partial_result_is_no_result(publish: Publish) -> None:
    one = only(publish(n=4, learners=learners(0.6, 0.6), peak_gpu_mib=81057))
    assert one.status == "failed"
    assert one.reason == "2 of 4 learners did not end: 2, 3 (the card held 81057 MiB at its fullest)"
    assert only(publish(learners=learners(0.6)[:1] * 2)).status == "failed"


@pytest.mark.parametrize(
    ("values", "passed", "said"),
    [
        ({"share_weights_env": "1"}, True, ""),
        ({"share_weights_env": "unset"}, True, ""),
        ({"share_weights_env": "unset", "peak_gpu_mib": 12000}, False, "the card held 12000 MiB"),
        ({"share_weights_env": "1", "peak_gpu_mib": 12000}, False, "sharing did not engage"),
        ({"share_weights_env": "0", "peak_gpu_mib": 12000}, True, ""),
        ({"share_weights_env": "0"}, False, "copies were asked for, and weights were shared"),
        ({"share_mode": "on", "shared_ranges": "0"}, False, "the daemon shared 0 ranges"),
        ({"share_mode": "on", "shared_ranges": "196", "peak_gpu_mib": 12000}, True, ""),
        ({"learners": learners(0.6, 0.61, peak_gb=None)}, None, "too little is said"),
        # Of a third nobody knows; two alone are more than the card held, or are not.
        ({"n": 3, "peak_gpu_mib": 9000}, True, ""),
        ({"n": 3, "peak_gpu_mib": 12000}, None, "too little is said"),
        ({"n": 3, "peak_gpu_mib": 12000, "share_weights_env": "0"}, None, "too little is said"),
    ],
)
def test_whether_sharing_engaged_is_decided_from_what_was_seen(
    publish: Publish, values: dict[str, Any], passed: bool | None, said: str
) -> None:
    found = controls(only(publish(**values)))["sharing-engaged"]
    assert found[0] is passed
    assert said in found[1]


def test_cores_that_wrapped_and_a_drop_that_may_have_failed_are_unverified(publish: Publish) -> None:
    found = controls(only(publish(arm="native", n=2, cpus_per_learner=16, cold_cache=True)))
    assert found["pinned-cpus"] == (None, "32 cores were asked of a host with 26: learners shared cores")
    assert found["page-cache"][0] is None
    assert "sharing-engaged" not in found


def test_equal_seeds_at_different_losses_fail_in_all_of_them(publish: Publish) -> None:
    publish("20260724-210000", learners=learners(0.6, 0.61))
    publish("20260724-220000", learners=learners(0.6, 0.62))
    # Another arm and number of learners, but the same seed: learner 0 agrees, and 1 is not there.
    publish("20260724-230000", arm="native", n=1, learners=learners(0.6))
    first, second, third = results(publish("20260724-235900", steps=20, learners=learners(0.5, 0.5)))[:3]
    assert controls(first)["equal-seeds"] == (
        False,
        "learner 1 ended at 0.61 here and at 0.62 in run_20260724-220000_r1, with one seed (1 of 2 learners differ)",
    )
    assert controls(second)["equal-seeds"][0] is False
    assert controls(third)["equal-seeds"] == (True, "")


@pytest.mark.parametrize("other", [{"steps": 20}, {"batch": 8}, {"maxseq": 1024}, {"env": {"torch": "2.8"}}])
def test_seeds_are_compared_only_where_all_else_is_equal(publish: Publish, other: dict[str, Any]) -> None:
    publish("20260724-210000", learners=learners(0.6, 0.61))
    for one in results(publish("20260724-220000", learners=learners(0.5, 0.51), **other)):
        assert controls(one)["equal-seeds"][0] is None


def test_a_learner_that_is_not_finite_disagrees_with_nobody(publish: Publish) -> None:
    publish("20260724-210000", learners=learners(NAN, 0.61))
    assert all(
        controls(one)["equal-seeds"][0]
        for one in results(publish("20260724-220000", learners=learners(0.6, 0.61)))
    )


def records(directory: Path, out: Path) -> list[Record]:
    bring(smolvm, directory, out)
    return [stored.record for stored in Store(out).load()]


def test_repetitions_share_a_cell_and_everything_else_stays_apart(publish: Publish, tmp_path: Path) -> None:
    for stamp, values in {
        "210000": {},
        "210100": {"wall_s": 101.0},
        "210200": {"env": {"driver": "580"}},
        "210300": {"share_weights_env": "0", "peak_gpu_mib": 12000},
        "210400": {"steps": 20},
        "210500": {"batch": 8},
        "210600": {"cold_cache": True},
    }.items():
        publish(f"20260724-{stamp}", **values)
    found = records(tmp_path / "results", tmp_path / "run")
    assert len({record.cell.hash for record in found}) == 5
    assert len({record.conditions.hash for record in found}) == 2
    pooled = query.aggregate(tmp_path / "run")
    assert sorted(pooled[pooled.metric == "wall_seconds"].n) == [1, 1, 1, 1, 1, 2]


def test_what_failed_a_control_enters_no_aggregate(publish: Publish, tmp_path: Path) -> None:
    found = records(publish(peak_gpu_mib=12000), tmp_path / "run")
    assert found[0].status == "invalid"
    assert "sharing did not engage" in found[0].reason
    assert query.aggregate(tmp_path / "run").empty
    ((name, digest),) = found[0].artifacts.items()
    assert name == "run_20260724-210000_r1.json"
    assert len(digest) == 64


ASKED = {"arm": "fork", "n": 1, "steps": 1, "batch": 1, "maxseq": 9, "wall_s": 1.0, "peak_gpu_mib": 9.0}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "is no result of smolvm's harness"),
        ('{"arm": "fork"}', "n: field required"),
        (json.dumps({"arm": "fork", "n": "2"}), "n: input should be a valid integer"),
        (json.dumps({"arm": ""}), "arm: is not a name of 1 to 64"),
        (json.dumps({**ASKED, "learners": [{"lid": "\x1b[31m"}]}), "learners.0.lid: is not a name"),
        (json.dumps({**ASKED, "learners": [], "fork_s": -1.0}), "fork_s: is below zero"),
        ('{"arm": "\\ud800"}', "cannot be read as JSON"),
    ],
)
def test_a_file_that_is_no_result_is_named_and_nothing_is_written(
    publish: Publish, tmp_path: Path, content: str, said: str
) -> None:
    (publish() / "other.json").write_text(content)
    with pytest.raises(UserError, match=r"other\.json ") as refused:
        bring(smolvm, tmp_path / "results", tmp_path / "run")
    assert said in refused.value.problem
    assert not (tmp_path / "run").exists()


DONE = {"tok_s": 100, "train_s": 10.0, "step_ms": 500, "loss0": 0.6931, "lossN": 0.6, "peak_gb": 6.0}


def test_a_copy_of_a_result_is_no_repetition(publish: Publish, tmp_path: Path) -> None:
    publish("20260724-210000")
    with pytest.raises(UserError, match="is the same result as"):
        records(publish("20260724-210100"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "values",
    [
        {"peak_gpu_mib": float("nan")},
        {
            "learners": [
                {**DONE, "lid": "0", "peak_gb": float("inf")},
                {**DONE, "lid": "1", "step_ms": float("nan")},
            ]
        },
        {"env": {"host_cores": float("nan")}},
        {"shared_ranges": "\u00b2"},
        {"learners": [{**DONE, "lid": "0"}, {**DONE, "lid": "\u00b2"}]},
    ],
)
def test_odd_numbers_elsewhere_are_read_too(publish: Publish, tmp_path: Path, values: dict[str, Any]) -> None:
    assert len(records(publish(**values), tmp_path / "run")) == 1


def test_it_is_found_by_its_entry_point() -> None:
    assert importer("smolvm") is smolvm
    with pytest.raises(UserError, match="imports 'smolv'") as refused:
        importer("smolv")
    assert refused.value.remedy == "did you mean 'smolvm'?"


def test_the_commands_import_status_and_views_go_together(
    publish: Publish, tmp_path: Path, coresident: Any
) -> None:
    publish("20260724-210000", learners=learners(0.6, NAN))
    publish("20260724-220000", n=3, learners=learners(0.65, 0.61))
    directory, run = str(tmp_path / "results"), str(tmp_path / "run")
    done = coresident("import", "smolvm", directory, "--out", run)
    assert (done.status, done.err) == (0, "")
    assert "2 results imported" in done.out
    status = " ".join(coresident("status", run).out.split())
    assert "1 nonfinite" in status
    assert "the loss of learner 1 is not finite" in status
    assert "1 of 3 learners did not end: 2" in status
    assert "equal-seeds failed x1" in status
    census = json.loads(coresident("show", run, "--view", "nonfinite", "--json").out)
    assert [row["nonfinite"] for row in census] == [[{"learner": 1, "what": "loss", "step": None}], []]
    assert [row["missing"] for row in census] == [[], [2]]
    again = coresident("import", "smolvm", directory, "--out", run)
    assert (again.status, "is there already" in again.err) == (2, True)
    assert "no study.yaml" in coresident("verdict", run).err


def test_an_import_of_nothing_is_refused_with_a_remedy(tmp_path: Path, coresident: Any) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("nothing")
    for directory, said in (("empty", "holds no result file"), ("nowhere", "is not a directory")):
        done = coresident("import", "smolvm", str(tmp_path / directory), "--out", str(tmp_path / "run"))
        assert done.status == 2
        assert said in done.err
        assert "-> give the directory" in done.err
    assert not (tmp_path / "run").exists()
