"""Every finding says what, how bad, and what to do; only a bad one fails the doctor."""

import os
from pathlib import Path

import pytest

from coresident.lab.run import locks
from coresident.lab.run.doctor import checks_host
from coresident.lab.run.doctor import findings as doctor
from coresident.lab.run.doctor.finding import bad, ok, warn


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv(locks.DIRECTORY, str(tmp_path / "locks"))


def test_this_machine_is_examined_whole_and_each_finding_has_its_remedy(tmp_path, card):
    found = doctor.findings(tmp_path, card)
    assert len(found) > 15
    for finding in found:
        assert finding.what
        assert bool(finding.remedy) == (finding.level != "ok"), finding
    said = "\n".join(finding.what for finding in found)
    for word in ("Python", "PyTorch", "cores", "memory", "swap", "clock", "git", "card 0", "durable write"):
        assert word in said
    assert list(tmp_path.iterdir()) == [tmp_path / "locks"]


def test_without_a_card_the_doctor_is_content(tmp_path):
    assert doctor.exit_status(doctor.findings(tmp_path)) == 0


def test_only_a_bad_finding_fails():
    assert doctor.exit_status([ok("a"), warn("b", "c")]) == 0
    assert doctor.exit_status([ok("a"), bad("b", "c")]) == 2


def test_an_old_python_is_bad():
    assert doctor.python((3, 10, 9)).level == "bad"
    assert doctor.python((3, 11, 0)).level == "ok"


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("2.9.1", "warn"), ("2.15.0", "warn"), (None, "bad")],
)
def test_torchs_version_is_judged_without_importing_it(version, level):
    assert doctor.torch({} if version is None else {"torch": version}).level == level


def test_variables_that_change_results_are_named():
    (found,) = doctor.variables({"OMP_NUM_THREADS": "3", "HOME": "/root"})
    assert found.level == "warn"
    assert "OMP_NUM_THREADS=3" in found.what
    assert [finding.level for finding in doctor.variables({"HOME": "/root"})] == ["ok"]


def test_an_unwritable_run_directory_is_bad():
    assert [finding.level for finding in doctor.disk(Path("/proc/none"))] == ["bad"]


def test_a_slow_disk_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_fsync_seconds", lambda _: 0.4)
    assert [finding.level for finding in doctor.disk(tmp_path)][-1] == "warn"


def test_a_temporary_folder_too_long_for_sockets_is_told(tmp_path):
    assert doctor.temporary(Path("/tmp")).level == "ok"
    found = doctor.temporary(Path("/tmp") / ("x" * 90))
    assert (found.level, "of 108 bytes" in found.what) == ("warn", True)


def test_a_decimal_comma_is_told(monkeypatch):
    monkeypatch.setattr(doctor.locale, "localeconv", lambda: {"decimal_point": ","})
    found = doctor.decimal_point()
    assert (found.level, "LC_NUMERIC" in found.remedy) == ("warn", True)


def test_unusable_locks_are_bad(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(locks.DIRECTORY, str(tmp_path / "file" / "locks"))
    assert doctor.device_locks().level == "bad"


def test_outside_a_repository_is_a_warning(tmp_path):
    assert doctor.repository(tmp_path).level == "warn"


class TestHost:
    @pytest.mark.parametrize(
        ("quota", "level", "said"),
        [(None, "ok", "4 of 8"), (2.5, "warn", "2.5 cores' worth"), (0.5, "warn", "")],
    )
    def test_a_quota_below_the_cores_is_told(self, quota, level, said):
        found = checks_host.processors([0, 1, 2, 3], quota, 8)
        assert found.level == level
        assert said in found.what

    def test_little_memory_is_told(self):
        assert checks_host.memory(2**30, None).level == "warn"
        assert "limit of 8.0 GiB" in checks_host.memory(2**33, 2**33).what

    @pytest.mark.parametrize(("average", "level"), [(0.1, "ok"), (0.9, "warn")])
    def test_load_is_judged_by_cores(self, average, level):
        assert checks_host.load(average, 2).level == level

    def test_swap(self):
        head = "Filename Type Size Used Priority\n"
        assert checks_host.swap(head).level == "ok"
        assert checks_host.swap(head + "/swapfile file 1 0 -2\n").level == "warn"

    @pytest.mark.parametrize(
        ("chosen", "level"),
        [("", "ok"), ("performance", "ok"), ("powersave", "warn"), ("performance,schedutil", "warn")],
    )
    def test_governor(self, chosen, level):
        assert checks_host.governor(chosen).level == level

    def test_huge_pages(self):
        assert [checks_host.hugepages(choice).level for choice in ("always", "madvise", "")] == [
            "warn",
            "ok",
            "ok",
        ]

    def test_clock_source(self):
        assert [checks_host.clock_source(name).level for name in ("tsc", "hpet", "")] == ["ok", "warn", "ok"]

    def test_a_wall_clock_that_jumps_is_told(self):
        jumps = iter([1000.0, 4600.0])
        assert checks_host.clocks(wall=lambda: next(jumps)).level == "warn"
        assert checks_host.clocks(monotonic=lambda: 5.0).level == "bad"

    def test_memory_that_cannot_be_read_is_bad(self):
        assert checks_host.smaps(os.getpid()).level == "ok"
        assert checks_host.smaps(2**22 + 1).level == "bad"

    def test_shared_memory(self, tmp_path):
        assert checks_host.shared_memory(tmp_path / "none").level == "warn"

    def test_orphans_can_be_adopted_here(self):
        assert checks_host.subreaper().level == "ok"
