"""--cpu-threads 0: cores of the affinity mask, container quotas, and the core left for the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker_proc.threads import cgroup_cores, default_threads, num_threads


@pytest.mark.parametrize(
    ("cores", "quota", "tp_size", "threads"),
    [
        (1, 0.0, 1, 1),
        (2, 0.0, 1, 2),
        (7, 0.0, 1, 7),
        (8, 0.0, 1, 7),
        (64, 0.0, 1, 63),
        (64, 2.9, 1, 2),
        (64, 0.5, 1, 1),
        (4, 16.0, 1, 4),
        (64, 8.0, 1, 7),
        (16, 0.0, 4, 3),
        (2, 0.0, 4, 1),
    ],
)
def test_default_is_usable_cores_rounded_down_less_one_from_eight_on(
    cores: int, quota: float, tp_size: int, threads: int
) -> None:
    assert default_threads(cores, quota, tp_size) == threads


def test_affinity_limits_the_default_but_not_what_was_asked_for() -> None:
    assert num_threads(1000) == 1000
    assert 1 <= num_threads(0) <= len(os.sched_getaffinity(0))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_no_quota_is_found_where_there_are_no_files(tmp_path: Path) -> None:
    assert cgroup_cores(tmp_path / "none", tmp_path / "absent") == 0


def test_version_2_quota_of_the_container_root(tmp_path: Path) -> None:
    write(tmp_path / "fs/cpu.max", "150000 100000\n")
    write(tmp_path / "own", "0::/\n")
    assert cgroup_cores(tmp_path / "fs", tmp_path / "own") == 1.5


def test_version_2_least_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    write(tmp_path / "own", "0::/user.slice/app.service/worker\n")
    write(tmp_path / "fs/user.slice/cpu.max", "400000 100000\n")
    write(tmp_path / "fs/user.slice/app.service/cpu.max", "300000 100000\n")
    write(tmp_path / "fs/user.slice/app.service/worker/cpu.max", "max 100000\n")
    write(tmp_path / "fs/other.service/cpu.max", "100000 100000\n")
    assert cgroup_cores(tmp_path / "fs", tmp_path / "own") == 3.0


@pytest.mark.parametrize("controller", ["cpu", "cpu,cpuacct"])
def test_version_1_quota_and_its_absence(tmp_path: Path, controller: str) -> None:
    folder = tmp_path / "fs" / controller
    write(tmp_path / "own", f"5:memory:/big\n4:{controller}:/docker/abc\n")
    write(folder / "cpu.cfs_quota_us", "-1\n")
    write(folder / "cpu.cfs_period_us", "100000\n")
    assert cgroup_cores(tmp_path / "fs", tmp_path / "own") == 0
    write(folder / "docker/abc/cpu.cfs_quota_us", "250000\n")
    write(folder / "docker/abc/cpu.cfs_period_us", "100000\n")
    assert cgroup_cores(tmp_path / "fs", tmp_path / "own") == 2.5


def test_version_1_group_of_another_controller_is_not_ours(tmp_path: Path) -> None:
    write(tmp_path / "own", "5:memory:/small\n4:cpuset,cpu:/\n")
    write(tmp_path / "fs/cpu/small/cpu.cfs_quota_us", "100000\n")
    write(tmp_path / "fs/cpu/small/cpu.cfs_period_us", "100000\n")
    assert cgroup_cores(tmp_path / "fs", tmp_path / "own") == 0


@pytest.mark.parametrize("text", ["", "max 100000", "garbage", "0 100000", "100000 0"])
def test_unreadable_quotas_are_none(tmp_path: Path, text: str) -> None:
    write(tmp_path / "fs/cpu.max", text)
    assert cgroup_cores(tmp_path / "fs", tmp_path / "own") == 0
