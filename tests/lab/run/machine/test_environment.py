"""Conditions hold all that could change a number unasked and nothing else; the environment shows where it
was."""

import json
import os
import subprocess

import pytest

from coresident.lab.run.machine import environment, git
from coresident.lab.run.machine.devices import Device, cpu


@pytest.fixture(autouse=True)
def no_standing_answers(monkeypatch):
    git._known.clear()
    monkeypatch.setattr(git, "_STANDS", 0)


@pytest.fixture
def project(tmp_path):
    """A repository with a script, as a user of `command` has one."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "bench.sh").write_text("echo 1\n")
    (folder / "other.txt").write_text("tracked\n")
    for arguments in (
        ("init", "-q"),
        ("add", "."),
        ("-c", "user.name=T", "-c", "user.email=t@t", "commit", "-qm", "first"),
    ):
        subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)
    return folder


def of_command(project, *argv, device=None, nvml=None, inputs=()):
    return environment.conditions(
        device or cpu(), "command", argv or ("sh", "bench.sh"), list(inputs), project, nvml
    )


def changed(before, after):
    return {
        name for name in before.values | after.values if before.values.get(name) != after.values.get(name)
    }


def test_the_same_asked_twice_is_the_same(project):
    assert of_command(project) == of_command(project)


def test_what_matters_is_named(project):
    found = of_command(project).values
    for name in ("coresident", "python", "packages", "package.torch", "kernel", "cpu", "cores", "device"):
        assert found[name]
    assert found["device"] == "cpu"


def test_the_hash_is_of_the_values(project, monkeypatch):
    before = of_command(project)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    after = of_command(project)
    assert changed(before, after) == {"env.OMP_NUM_THREADS"}
    assert before.hash != after.hash


@pytest.mark.parametrize(
    "name",
    ["MKL_DEBUG_CPU_TYPE", "PYTORCH_ALLOC_CONF", "MALLOC_ARENA_MAX", "CUDA_LAUNCH_BLOCKING", "LD_PRELOAD_X"],
)
def test_variables_that_change_speed_are_conditions(project, monkeypatch, name):
    before = of_command(project)
    monkeypatch.setenv(name, "1")
    assert changed(before, of_command(project)) == {f"env.{name}"}


def test_places_times_and_untracked_files_are_no_conditions(project, monkeypatch):
    before = of_command(project)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    monkeypatch.setenv("HOME_OF_SOMEONE", "1")
    (project / "untracked").write_text("x")
    os.utime(project / "bench.sh", (1, 1))
    assert of_command(project) == before


def test_a_changed_script_is_another_condition(project):
    before = of_command(project)
    (project / "bench.sh").write_text("echo 2\n")
    assert changed(before, of_command(project)) == {"file.bench.sh", "git.diff"}


def test_a_changed_tracked_file_beside_it_is_too(project):
    before = of_command(project)
    (project / "other.txt").write_text("changed\n")
    assert changed(before, of_command(project)) == {"git.diff"}


def test_a_script_within_a_shells_line_is_found(project):
    found = of_command(project, "sh", "-c", "cd . && sh bench.sh | cat").values
    assert {"file.bench.sh", "file.sh", "file.cat"} <= found.keys()


def test_the_same_project_elsewhere_has_the_same_conditions(project):
    before = of_command(project)
    elsewhere = project.rename(project.parent / "elsewhere")
    assert of_command(elsewhere) == before


def test_a_changed_input_is_another_condition(project, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text("1")
    before = of_command(project, inputs=[data])
    data.write_text("2")
    assert changed(before, of_command(project, inputs=[data])) == {"input.pairs.jsonl"}


def test_our_own_workloads_depend_on_our_source_and_not_on_the_folder(project):
    before = environment.conditions(cpu(), "pool.dpo", ["python"], [], project)
    (project / "other.txt").write_text("changed\n")
    assert environment.conditions(cpu(), "pool.dpo", ["python"], [], project) == before


def test_a_cards_driver_is_a_condition_and_its_uuid_is_none(project, card, cuda):
    before = of_command(project, device=cuda, nvml=card)
    assert before.values["device.driver"] == "1.2.3"
    other = Device("cuda", "GPU-other", cuda.name, 5, cuda.memory_total)
    assert of_command(project, device=other, nvml=card) == before
    card.told = {**card.told, "driver": "1.2.4"}
    assert changed(before, of_command(project, device=cuda, nvml=card)) == {"device.driver"}
    assert cuda.uuid not in json.dumps(before.values)


def test_the_environment_shows_source_place_and_inputs(project, tmp_path):
    (project / "other.txt").write_text("changed\n")
    (project / "new").write_text("x")
    data = tmp_path / "data"
    data.write_text("1")
    found = environment.environment(cpu(), [data], project)
    assert found["source"] == "host"
    assert found["git"]["dirty"]
    assert (found["git"]["changed"], found["git"]["untracked"]) == (["other.txt"], ["new"])
    assert len(found["git"]["commit"]) == 40
    assert found["affinity"] == sorted(os.sched_getaffinity(0))
    assert len(found["inputs"][str(data)]) == 64
    json.dumps(found, allow_nan=False)


def test_outside_a_repository_the_fact_says_so(tmp_path):
    assert environment.environment(cpu(), [], tmp_path)["git"] == {"git": "not a git repository"}
    assert of_command(tmp_path).values["git"] == "not a git repository"


def test_a_word_too_long_to_be_a_file_is_none(tmp_path):
    code = "import json\n" + "value = 1\n" * 500
    (tmp_path / "data").write_text("1")
    assert environment.files_of(["no-such-program", "-c", code, "data"], tmp_path) == [tmp_path / "data"]
