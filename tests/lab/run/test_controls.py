"""The lab's own controls: passed and failed from what was seen, unverified with a reason from what could
not be."""

from types import SimpleNamespace

import pytest

from coresident.lab.records.schema import Control, MetricValue, Series
from coresident.lab.run.controls import exclusive_device, finite, pinned_cpus
from coresident.lab.run.machine.cores import allowed
from coresident.lab.run.machine.devices import cpu

TEN = SimpleNamespace(wall=10.0)


def reported(metrics=None, samples=None, series=None, nonfinite=()):
    return SimpleNamespace(
        metrics=metrics or {}, samples=samples or {}, series=series or {}, nonfinite=nonfinite
    )


def affinity(*entries):
    return {
        "affinity": [
            {"cpus": cpus, "processes": 1, "pids": [100 + place], "sightings": sightings}
            for place, (cpus, sightings) in enumerate(entries)
        ]
    }


class TestExclusiveDevice:
    def test_on_a_quiet_host_the_lock_is_enough(self):
        found = exclusive_device(
            cpu(), 0.0, None, {"foreign_cpu_seconds": 0.3, "stolen_cpu_seconds": 0.0}, TEN
        )
        assert (found.state, found.asked) == ("passed", "exclusive")
        assert found.ran == {"lock": "held", "foreign_cpu_seconds": 0.3, "stolen_cpu_seconds": 0.0}

    @pytest.mark.parametrize("load", [{"foreign_cpu_seconds": 4.0}, {"stolen_cpu_seconds": 4.0}])
    def test_foreign_load_is_unverified_with_the_figure(self, load):
        telemetry = {"foreign_cpu_seconds": 0.0, "stolen_cpu_seconds": 0.0, **load}
        found = exclusive_device(cpu(), 0.0, None, telemetry, TEN)
        assert found.state == "unverified"
        assert "4.00 CPU seconds" in found.reason

    def test_clock_ticks_of_a_short_cell_are_no_load(self):
        telemetry = {"foreign_cpu_seconds": 0.04, "stolen_cpu_seconds": 0.0}
        assert exclusive_device(cpu(), 0.0, None, telemetry, SimpleNamespace(wall=0.01)).state == "passed"

    def test_load_that_was_not_read_is_not_invented(self):
        assert exclusive_device(cpu(), 0.0, None, {}, TEN).state == "unverified"

    def test_a_card_alone_with_the_cell_passes(self, cuda):
        assert exclusive_device(cuda, 3.0, None, {"foreign_pids": []}, TEN).state == "passed"

    def test_a_foreign_process_fails(self, cuda):
        found = exclusive_device(cuda, 3.0, None, {"foreign_pids": [99]}, TEN)
        assert (found.state, found.ran["foreign_pids"]) == ("failed", [99])
        assert "99" in found.reason

    def test_a_leak_fails_with_its_reason(self, cuda):
        found = exclusive_device(cuda, 3.0, "900 MiB are still in use", {"foreign_pids": []}, TEN)
        assert (found.state, found.reason) == ("failed", "900 MiB are still in use")

    def test_hidden_processes_are_unverified(self, cuda):
        found = exclusive_device(cuda, 3.0, None, {"foreign_pids": None}, TEN)
        assert found.state == "unverified"
        assert "cannot be seen" in found.reason


class TestPinnedCpus:
    def test_workers_on_their_own_cores_pass(self):
        found = pinned_cpus([[0], [1]], affinity(([0], 9), ([0, 1], 9), ([1], 9)))
        assert (found.state, found.asked) == ("passed", [[0], [1]])
        assert {"cpus": [0], "pids": [100]} in found.ran

    def test_a_process_outside_the_cells_cores_fails(self):
        found = pinned_cpus([[0]], affinity(([0], 9), ([0, 1], 9)))
        assert found.state == "failed"
        assert found.reason == "processes 101 could run on cores 0, 1, asked was 0"

    def test_a_worker_that_did_not_pin_itself_fails(self):
        found = pinned_cpus([[0], [1]], affinity(([0], 9), ([0, 1], 9)))
        assert (found.state, found.reason) == ("failed", "no process was pinned to cores 1")

    def test_a_process_seen_once_on_its_way_proves_nothing(self):
        assert pinned_cpus([[0]], affinity(([0], 9), ([0, 1], 1))).state == "unverified"

    def test_a_cell_seen_too_little_is_unverified(self):
        assert pinned_cpus([[0], [1]], affinity(([0, 1], 2))).state == "unverified"
        found = pinned_cpus([[0]], {"affinity": []})
        assert (found.state, found.reason) == ("unverified", "no process of the cell was seen while it ran")

    def test_unpinned_asked_and_ran_passes(self):
        found = pinned_cpus([[], []], affinity((allowed(), 9)))
        assert (found.state, found.asked, found.ran) == ("passed", "unpinned", "unpinned")

    @pytest.mark.skipif(len(allowed()) < 2, reason="one core only")
    def test_unpinned_asked_and_pinned_ran_fails(self):
        found = pinned_cpus([[]], affinity((allowed(), 9), (allowed()[:1], 9)))
        assert found.state == "failed"
        assert "asked was unpinned" in found.reason


class TestFinite:
    def test_finite_numbers_pass_and_are_counted(self):
        found = finite(
            reported(
                {"speed": MetricValue(value=1.0, unit="1/s", samples=[1.0, 2.0])},
                {"speed": [1.0]},
                {"loss": Series(digest="d", length=2, values=[0.5, 0.4])},
            )
        )
        assert (found.state, found.ran) == ("passed", {"numbers": 6})

    def test_plain_dicts_will_do(self):
        assert finite(reported({"a": {"value": 1, "unit": "s"}}, {}, {"b": [1, 2.0]})).state == "passed"

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1.0", None])
    @pytest.mark.parametrize("kind", ["metrics", "samples", "series"])
    def test_anything_else_fails_naming_it(self, kind, value):
        content = {"x": {"value": value}} if kind == "metrics" else {"x": [1.0, value]}
        found = finite(reported(**{kind: content}))
        assert found.state == "failed"
        assert "'x'" in found.reason
        Control.model_validate_json(found.model_dump_json())

    def test_what_the_reader_kept_out_fails(self):
        found = finite(reported({"a": 1.0}, nonfinite=["7-1.jsonl line 3: metric 'speed' is NaN"]))
        assert (found.state, found.reason) == ("failed", "7-1.jsonl line 3: metric 'speed' is NaN")

    def test_a_series_too_long_to_be_kept_is_unverified(self):
        found = finite(reported(series={"loss": Series(digest="d", length=9, values=[])}))
        assert found.state == "unverified"

    def test_nothing_reported_proves_nothing(self):
        assert finite(reported()).state == "unverified"
