"""Workers get cores of their own, from those that are really theirs, and no core twice."""

import os

import pytest

from coresident.errors import MachineError
from coresident.lab.run.machine.cores import allowed, assign, parse_list, read_back, spread
from coresident.workload import Needs


def needs(workers, each):
    return Needs(workers=workers, cpus_per_worker=each)


def test_core_sets_are_disjoint_and_of_the_size_asked():
    found = assign(needs(3, 2), cores=[4, 5, 6, 7, 8, 9, 10])
    assert found == [[4, 5], [6, 7], [8, 9]]


def test_too_many_are_refused_with_what_is_asked_and_what_there_is():
    with pytest.raises(MachineError, match=r"asks for 8 cores \(4 workers x 2\), 2 are usable") as caught:
        assign(needs(4, 2), cores=[0, 1])
    assert "fewer workers" in caught.value.remedy


def test_a_quota_counts_as_fewer_cores():
    assert assign(needs(2, 1), cores=[0, 1, 2, 3], quota=2.5) == [[0], [1]]
    with pytest.raises(MachineError, match=r"2 are usable \(a cgroup's quota allows 2.5 of 4\)"):
        assign(needs(3, 1), cores=[0, 1, 2, 3], quota=2.5)


def test_unpinned_workers_may_be_more_than_cores():
    assert assign(needs(64, 0)) == [[]] * 64


def test_this_processs_affinity_bounds_the_choice(python):
    core = allowed()[-1]
    process = python(
        f"import os; os.sched_setaffinity(0, {{{core}}})\n"
        "from coresident.lab.run.machine.cores import assign; from coresident.workload import Needs\n"
        "print(assign(Needs(workers=1, cpus_per_worker=1)))\n"
        "try: assign(Needs(workers=2, cpus_per_worker=1))\n"
        "except Exception as error: print(error.problem)"
    )
    assert process.stdout.readline() == f"[[{core}]]\n"
    assert "2 cores (2 workers x 1), 1 are usable" in process.stdout.readline()


def test_each_core_gives_one_hardware_thread_before_any_gives_a_second(tmp_path):
    for core, siblings in {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}.items():
        folder = tmp_path / f"cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert spread([0, 1, 4, 5], tmp_path) == [0, 1, 4, 5]
    assert spread([0, 4, 5], tmp_path) == [0, 5, 4]


@pytest.mark.parametrize(("text", "cores"), [("0", [0]), ("0-2,5\n", [0, 1, 2, 5]), ("", [])])
def test_the_kernels_lists_are_read(text, cores):
    assert parse_list(text) == cores


PINNED = """
import os, sys, threading
late = threading.Thread(target=lambda: (barrier.wait(), sys.stdin.readline()))
barrier = threading.Barrier(2)
if sys.argv[2] == "late": late.start(); barrier.wait()
os.sched_setaffinity(0, {int(sys.argv[1])})
print("pinned", flush=True); sys.stdin.readline()
"""


def test_where_a_process_may_run_is_read_back(python):
    core = allowed()[-1]
    process = python(PINNED, str(core), "early")
    process.stdout.readline()
    assert read_back([process.pid]) == {process.pid: [[core]]}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core only")
def test_a_thread_started_before_the_pinning_is_seen_to_have_escaped_it(python):
    core = allowed()[-1]
    process = python(PINNED, str(core), "late")
    process.stdout.readline()
    assert read_back([process.pid])[process.pid] == sorted([[core], allowed()])


def test_a_process_that_is_gone_is_left_out(python):
    process = python("")
    process.wait()
    assert read_back([process.pid, os.getpid()]).keys() == {os.getpid()}
