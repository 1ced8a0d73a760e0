"""common/machine.py: the usable cores in a container or a batch job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common import machine as usable
from common.machine import _cgroup_quota, usable_cores


def quota(tmp_path: Path, own: str, limits: dict[str, str]) -> float | None:
    """The quota in a simulated cgroup tree.

    :param own: content of ``/proc/self/cgroup``
    :param limits: maps folders below the root to their ``cpu.max``
    """
    root = tmp_path / "cgroup"
    for folder, limit in limits.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "cpu.max").write_text(limit + "\n")
    (tmp_path / "membership").write_text(own)
    return _cgroup_quota(root, tmp_path / "membership")


@pytest.mark.parametrize(
    "own, limits, cores",
    [
        ("0::/job\n", {"job": "200000 100000"}, 2.0),
        ("0::/job\n", {"job": "max 100000"}, None),
        ("0::/job\n", {"job": "300000 100000", "": "150000 100000"}, 1.5),  # the parent's is smaller
        ("0::/job\n", {"other": "100000 100000"}, None),
        ("0::/\n", {"": "100000 100000"}, 1.0),  # in a container, whose own cgroup is the root
        ("0::/docker/1234\n", {"": "100000 100000"}, 1.0),  # the host's name of it, which does not exist inside
        ("4:cpu:/v1\n0::/job\n", {"job": "200000 100000", "v1": "100000 100000"}, 2.0),
        ("", {}, None),
    ],
)
def test_the_quota_is_the_smallest_from_our_cgroup_up_to_the_root(
    own: str, limits: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    assert quota(tmp_path, own, limits) == cores


def test_a_limit_above_the_root_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert quota(tmp_path, "0::/job\n", {"job": "max 100000"}) is None


def test_a_system_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert _cgroup_quota(tmp_path / "cgroup", tmp_path / "absent") is None


@pytest.mark.parametrize(
    "affinity, limit, cores",
    [(8, None, 8), (8, 2.9, 2), (8, 0.5, 1), (2, 64.0, 2)],
)
def test_usable_cores_are_those_of_the_mask_within_the_quota(
    affinity: int, limit: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Usable cores are those of the affinity mask, at most the cgroup's quota.

    Claim (dataloading/README.md, 3): usable cores are those of the mask and the quota.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    monkeypatch.setattr(usable, "_cgroup_quota", lambda root, membership: limit)
    assert usable_cores() == cores


@pytest.mark.parametrize("count, cores", [(6, 6), (None, 1)])
def test_without_affinity_masks_the_machines_cores_count(
    count: int | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    monkeypatch.setattr(usable, "_cgroup_quota", lambda root, membership: None)
    assert usable_cores() == cores


def test_a_real_affinity_mask_is_obeyed() -> None:
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, mask)
