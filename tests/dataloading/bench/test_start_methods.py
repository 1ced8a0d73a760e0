"""The benchmark of the start methods: what it measures, what breaks, and that a held lock hangs a fork alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.command_line.cli import parse
from common.errors import UsageError
from dataloading.bench import held_lock, start_methods
from dataloading.bench.__main__ import LoadingBenchConfig
from dataloading.bench.start_once import NOTHING, make_loader, start


@pytest.mark.parametrize("method", ["forkserver", "threads"])
def test_a_start_is_timed_and_its_workers_are_weighed(pictures: Path, method: str) -> None:
    measured = start(make_loader(method, 1, 1000, str(pictures), NOTHING), 1)
    assert {"first epoch, s", "second epoch, s"} < measured.keys()
    assert (measured["own memory, GB"] > 0) == (method == "forkserver")


def test_a_held_lock_hangs_every_forked_worker_and_no_other() -> None:
    """Workers that are forked while another thread holds a lock never get it, and those of a fork server do.

    Claim (dataloading/README.md, 10): a fork copies a lock that a thread holds, and the worker hangs.
    """
    with held_lock.lock:
        assert held_lock.count_hanging("fork", 3, wait_s=0.5) == 3
        assert held_lock.count_hanging("forkserver", 3, wait_s=120) == 0


def test_the_error_of_a_start_is_one_line(pictures: Path, tmp_path: Path) -> None:
    """The first image is whole, so that the benchmark begins."""
    first, *_ = sorted(pictures.glob("*/*.jpg"))
    (tmp_path / "a.jpg").write_bytes(first.read_bytes())
    (tmp_path / "b.jpg").write_bytes(first.read_bytes()[:300])
    with pytest.raises(UsageError, match=r"workers that are started by threads failed: .*b\.jpg is damaged"):
        start_methods.measure(("threads",), 1, 2, str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_methods_are_compared(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All start methods are timed in turns, and what breaks is named.

    Claim (dataloading/README.md, 10): a lambda and a lock in the data set break every method but fork and threads.
    """
    monkeypatch.setattr(start_methods, "SIZES", {"": 0})
    monkeypatch.setattr(start_methods, "EXTRAS", ("a lambda", "a lock"))
    monkeypatch.setattr(start_methods, "STARTS", held_lock.GROUP)
    methods = ("fork", "spawn", "threads")
    arguments = ("--start-method", ",".join(methods), "--repeats", "2", "--output", str(tmp_path))
    config = parse(LoadingBenchConfig, "dataloading.bench", None, arguments)
    measured = start_methods.measure(methods, 1, 2, str(pictures))
    assert all(len(starts) == 2 for starts in measured["turns"].values())
    for thing in ("a lambda", "a lock"):
        working = [method for method, outcome in measured["breaks"][thing].items() if outcome == "works"]
        assert working == ["fork", "threads"]
    assert "pickle" in measured["breaks"]["a lock"]["spawn"]
    hanging = {method: int(count) for method, count in measured["hanging"].items()}
    assert hanging.pop("fork") > 0
    assert not any(hanging.values())
    assert "second epoch, s" in start_methods.report(config, measured)
    assert json.loads((tmp_path / "start-methods.json").read_text())["hanging"]
    assert (tmp_path / "start-methods.png").is_file()
