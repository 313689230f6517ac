"""Limits of control groups, both versions, wherever in the hierarchy they are set."""

import pytest

from coresident.cgroup import limits

GIB = 2**30


def tree(root, cgroup, mounts, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(mounts)
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "30 20 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "31 20 0:27 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 20 0:28 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def test_version_2_in_its_own_group(tmp_path):
    found = limits(
        tree(
            tmp_path,
            "0::/job\n",
            V2.format(root="/"),
            {
                "/sys/fs/cgroup/job/cpu.max": "150000 100000\n",
                "/sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
                "/sys/fs/cgroup/job/memory.current": f"{5 * GIB}\n",
                "/sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB}\n",
            },
        )
    )
    assert (found.cpus, found.memory, found.memory_free) == (1.5, 8 * GIB, 5 * GIB)


def test_the_narrowest_ancestor_binds(tmp_path):
    found = limits(
        tree(
            tmp_path,
            "0::/slurm/job/step\n",
            V2.format(root="/"),
            {
                "/sys/fs/cgroup/slurm/cpu.max": "200000 100000\n",
                "/sys/fs/cgroup/slurm/job/cpu.max": "400000 100000\n",
                "/sys/fs/cgroup/slurm/job/step/cpu.max": "max 100000\n",
                "/sys/fs/cgroup/slurm/memory.max": f"{2 * GIB}\n",
                "/sys/fs/cgroup/slurm/memory.current": "0\n",
                "/sys/fs/cgroup/slurm/job/step/memory.max": "max\n",
            },
        )
    )
    assert (found.cpus, found.memory) == (2.0, 2 * GIB)


def test_version_1(tmp_path):
    found = limits(
        tree(
            tmp_path,
            "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n",
            V1.format(root="/"),
            {
                "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
                "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
                "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
                "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB}\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
        )
    )
    assert (found.cpus, found.memory, found.memory_free) == (3.0, 4 * GIB, 3 * GIB)


@pytest.mark.parametrize("mounts", [V2, V1])
def test_inside_a_container_the_mount_shows_a_subtree(tmp_path, mounts):
    found = limits(
        tree(
            tmp_path,
            "5:cpu,cpuacct:/docker/abc\n0::/docker/abc\n",
            mounts.format(root="/docker/abc"),
            {
                "/sys/fs/cgroup/cpu.max": "50000 100000\n",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
        )
    )
    assert found.cpus == 0.5


def test_no_limit_is_none(tmp_path):
    unlimited = {
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    found = limits(tree(tmp_path, "5:cpu,cpuacct:/\n4:memory:/\n", V1.format(root="/"), unlimited))
    assert (found.cpus, found.memory, found.memory_free) == (None, None, None)


def test_no_cgroups_at_all_is_no_limit(tmp_path):
    assert limits(tmp_path).cpus is None


def test_this_machine_can_be_read():
    limits()
