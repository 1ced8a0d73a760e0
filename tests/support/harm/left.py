"""The results of a run, for a comparison bit by bit, and its leftovers: processes, shared memory, half-written files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from common.training.metrics import TIMES, read_metrics
from ddp.checkpoint import load, storage
from tests.ddp.jobs import newest
from tests.support.harm.kill import Run

TIMINGS = (*TIMES, "waited")


def outcome(run_dir: Path) -> dict[str, Any]:
    """All results of a run, flat: a value per tensor (its dtype, shape and bytes), number and metric; no timings.

    :raises common.command_line.cli.UsageError: when no checkpoint is whole
    """
    path, manifest = newest(run_dir)
    contents: dict[str, Any] = {file.stem: load(path, file.stem) for file in path.glob("*.pt")}
    for rank in contents["ranks"]:
        rank["window"] = rank["window"][:3]  # then come its seconds
    contents["progress"] = manifest.progress
    contents["at"] = (manifest.epoch, manifest.step, manifest.step_in_epoch)
    contents["metrics"] = read_metrics(run_dir)
    return dict(_leaves("", contents))


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, torch.Tensor):
        yield name, (tree.dtype, tuple(tree.shape), tree.contiguous().numpy().tobytes())
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            if key not in TIMINGS:
                yield from _leaves(f"{name}.{key}", value)
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(f"{name}[{index}]", value)
    else:
        yield name, tree


def differences(run_dir: Path, expected: Mapping[str, Any]) -> list[str]:
    """The names of all results that are not, bit for bit, as in another run's :func:`outcome`."""
    actual = outcome(run_dir)
    return sorted(name for name in {*actual, *expected} if actual.get(name) != expected.get(name))


def newest_step(run_dir: Path) -> int:
    """The step of the run's newest checkpoint, of which every byte is checked; 0 if there is none."""
    found = storage.newest(run_dir)
    return found[1].step if found else 0


def assert_ends_as(expected: Mapping[str, Any], *runs: Run) -> None:
    """The last run on one directory ends well, with the results of another run, and leaves nothing but these."""
    runs[-1].finish()
    assert differences(runs[-1].run_dir, expected) == []
    assert_nothing_left(*runs)


def assert_nothing_left(*runs: Run) -> None:
    """No process (and so no socket), no shared memory, and no half-written file is left by runs on one directory, the last of
    which wrote to the end."""
    assert_nothing_runs(*runs)
    assert not litter(runs[-1].run_dir)


def assert_nothing_runs(*runs: Run) -> None:
    """No process is left, and no shared memory."""
    for run in runs:
        left = run.seconds_to_end(timeout_s=10.0)
        assert left is not None, f"left running: {run.processes()}"
        segments = os.listdir("/dev/shm")
        owned = [name for name in segments if run.pids & {int(number) for number in re.findall(r"\d+", name)}]
        assert not owned, f"left in /dev/shm: {owned}"


def litter(run_dir: Path) -> list[str]:
    """Files and folders that were half written or half removed when a process died."""
    return [path.name for pattern in (".*", "*.scratch") for path in run_dir.rglob(pattern)]
