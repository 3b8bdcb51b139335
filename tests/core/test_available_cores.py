"""Quotas are those of the control groups that the files of the system describe, in both versions."""

import os

import pytest

from anymamba.core.available_cores import available_cores, limit_threads, read_quota

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {group} {directory} rw,relatime - cgroup cgroup rw,{controllers}\n"
    "33 31 0:30 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
)


@pytest.fixture
def write_system(tmp_path):
    """Return a function that writes the files of a system and returns its root."""

    def write(groups, mounts, files):
        for name, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def v1_files(directory, quota, period=100_000):
    return {f"{directory}/cpu.cfs_quota_us": f"{quota}\n", f"{directory}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        ({"": "150000 100000"}, 1.5),  # a container that sees its own group as the root
        ({"a": "max 100000", "a/b": "50000 100000"}, 0.5),
        ({"a": "200000 100000", "a/b": "max 100000"}, 2.0),  # the limit of a group holds for those inside it
        ({"a": "120000 50000", "a/b": "300000 100000"}, 2.4),
        ({"a/b": "150000 100000", "a/b/c": "10000 100000", "d": "10000 100000"}, 1.5),  # of other groups
        ({"a": "max 100000", "a/b": "max 100000"}, None),
        ({}, None),
    ],
)
def test_a_quota_of_version_2_is_the_smallest_on_the_path(write_system, limits, quota):
    files = {f"sys/fs/cgroup/{group}/cpu.max": f"{text}\n" for group, text in limits.items()}
    assert read_quota(write_system("0::/a/b\n", V2, files)) == quota


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("outer", "inner", "quota"), [(-1, 150_000, 1.5), (100_000, 150_000, 1.0), (-1, -1, None)])
def test_a_quota_of_version_1_is_the_smallest_on_the_path(write_system, controllers, outer, inner, quota):
    directory = f"sys/fs/cgroup/{controllers}"
    mounts = V1.format(group="/", directory=f"/{directory}", controllers=controllers)
    groups = f"9:name=systemd:/\n3:cpuset:/other\n2:{controllers}:/a/b\n0::/\n"
    files = v1_files(f"{directory}/a", outer) | v1_files(f"{directory}/a/b", inner) | v1_files("sys/fs/cgroup/other", 1)
    assert read_quota(write_system(groups, mounts, files)) == quota


def test_a_mount_may_begin_at_the_group_and_have_a_blank_in_its_name(write_system):
    mounts = V1.format(group="/docker/1f", directory="/my\\040groups", controllers="cpu")
    groups = "2:cpu:/docker/1f/worker\n"
    files = v1_files("my groups", 250_000) | v1_files("my groups/worker", 50_000, 25_000)
    assert read_quota(write_system(groups, mounts, files)) == 2.0


@pytest.mark.parametrize("group", ["/../other", "/elsewhere"])
def test_for_a_group_outside_the_mount_its_top_counts(write_system, group):
    mounts = V1.format(group="/docker/1f", directory="/sys/fs/cgroup/cpu", controllers="cpu")
    files = v1_files("sys/fs/cgroup/cpu", 150_000) | v1_files("sys/fs/other", 10_000) | v1_files("elsewhere", 10_000)
    assert read_quota(write_system(f"2:cpu:{group}\n", mounts, files)) == 1.5


def test_both_versions_may_be_mounted(write_system):
    mounts = V1.format(group="/", directory="/sys/fs/cgroup/cpu", controllers="cpu") + V2.replace("/cgroup ", "/new ")
    files = v1_files("sys/fs/cgroup/cpu", 300_000) | {"sys/fs/new/cpu.max": "150000 100000"}
    assert read_quota(write_system("2:cpu:/\n0::/\n", mounts, files)) == 1.5


@pytest.mark.parametrize("text", ["", "max", "150000", "many 100000", "150000 0", "-1 100000", "1 2 3", "0 100000"])
def test_files_of_another_form_are_no_limit(write_system, text):
    assert read_quota(write_system("0::/\nnonsense\n", f"\nnonsense\n{V2}", {"sys/fs/cgroup/cpu.max": text})) is None


def test_without_files_of_the_system_there_is_no_quota(tmp_path):
    assert read_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("machine", "affinity", "quota", "threads", "reason"),
    [
        (4, 4, 1.5, 2, "a quota of 1.5 cores"),
        (4, 4, 0.2, 1, "a quota of 0.2 cores"),
        (4, 4, 3.0, 3, "a quota of 3 cores"),
        (4, 4, 3.5, 4, "the machine has 4 cores"),
        (4, 1, 1.5, 1, "the process may run on 1 of 4 cores"),
        (4, 3, 1.5, 2, "a quota of 1.5 cores"),
        (4, 4, None, 4, "the machine has 4 cores"),
    ],
)
def test_threads_follow_quota_and_affinity(machine, affinity, quota, threads, reason):
    assert limit_threads(machine, affinity, quota) == (threads, reason)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_the_affinity_is_that_of_this_process(tmp_path):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert available_cores(tmp_path).threads == 1
    finally:
        os.sched_setaffinity(0, cores)
