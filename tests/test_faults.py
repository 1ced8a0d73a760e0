"""A run that is hurt says so in one line, and goes on from there to the bits that it would have had."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from torch import Tensor

from common.data.datasets import ImageData
from common.files.run_directory import CONFIG_FILE, LOCK_FILE
from common.signals.stop_request import REQUEUE
from common.training.metrics import read_metrics
from ddp import train
from ddp.checkpoint import list_checkpoints, storage
from ddp.checkpoint.folder import MANIFEST
from ddp.checkpoint.storage import name_of
from ddp.job import Job
from tests.ddp.jobs import newest
from tests.support.harm.disk import can_mount, flip_bit, read_only, small_disk
from tests.support.harm.kill import STEPS, VICTIMS, LaunchedRun, Run, forked_training, kill, training
from tests.support.harm.left import assert_ends_as, assert_nothing_left, assert_nothing_runs, outcome
from tests.support.harm.network import TwoHosts, two_hosts, why_not
from tests.support.launch import statuses_by_rank

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing befell, with its last five checkpoints."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    with training(run_dir, "--keep-last", "5") as run:
        run.finish()
        assert_nothing_left(run)
    return run_dir


@pytest.fixture(scope="module")
def expected(undisturbed: Path) -> dict[str, Any]:
    return outcome(undisturbed)


def refusal_of(run: LaunchedRun) -> str:
    """The one line of a run that ends with a user error; there is no rank's traceback."""
    assert run.wait() == 1, run.output  # torchrun's; the rank's follows
    assert "ddp/train.py" not in run.output  # no traceback of a rank
    statuses = statuses_by_rank(run.output)
    assert statuses.pop(0) == 2, run.output
    # Who lives on when torchrun has seen the end of rank 0 is sent a SIGTERM, and may have been asked to stop in time.
    assert set(statuses.values()) <= {2, REQUEUE, -signal.SIGTERM}, run.output
    return only_error(run)


def only_error(run: Run) -> str:
    (line,) = run.errors
    return line


def assert_finite(checkpoint: Path) -> None:
    """Every weight is, and every statistic."""
    weights = storage.read(checkpoint, "model")
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


def finish(run_dir: Path, expected: dict[str, Any], *flags: str) -> None:
    """Start the run again, which must end with the right bits and leave nothing behind."""
    with training(run_dir, "--resume", *flags) as run:
        assert_ends_as(expected, run)


def test_a_disk_that_is_full_and_then_read_only(tmp_path: Path, expected: dict[str, Any]) -> None:
    """A full disk, and then a read-only one, end the run with one line each; the run then continues.

    Claim (ddp/resilience/README.md): a killed loader worker, a full `/dev/shm`, and a full or read-only disk are one line
    each, and the run continues from its checkpoint.
    """
    run_dir = tmp_path / "disk" / "run"
    run_dir.parent.mkdir()
    with small_disk(run_dir.parent, "30m") as resize:  # two checkpoints and a half
        with training(run_dir) as run:
            third = run_dir / storage.FOLDER / name_of(0, 9)
            assert refusal_of(run) == (
                f"error: {third} cannot be written (No space left on device): make room, then continue with --resume"
            )
            assert_nothing_left(run)
        assert newest(run_dir)[1].step == 6

        resize("200m")
        with training(run_dir, "--resume") as run:
            run.wait_for_step(12)  # the run before came to the ninth
            with read_only(run_dir):
                assert re.fullmatch(
                    rf"error: {run_dir}\S* cannot be written \(Read-only file system\): remove the cause, then continue with "
                    "--resume",
                    refusal_of(run),
                )
            assert_nothing_runs(run)  # what it was just writing or removing cannot be removed any more
        with read_only(run_dir), training(run_dir, "--resume") as run:
            assert refusal_of(run).startswith(f"error: --run-dir {run_dir} cannot be written: [Errno 30] Read-only")
        assert newest(run_dir)[1].step >= 9
        finish(run_dir, expected)


def test_damaged_checkpoints_are_passed_over(tmp_path: Path, undisturbed: Path, expected: dict[str, Any]) -> None:
    """Damaged checkpoints are passed over.

    Claim (ddp/resilience/README.md): damaged checkpoints are passed over.
    """
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    checkpoints = list_checkpoints(run_dir / storage.FOLDER)
    last, before_last = reversed(checkpoints[-2:])
    size = (last / "model.pt").stat().st_size
    os.truncate(last / "model.pt", size // 2)
    flip_bit(before_last / "optimizer.pt", size // 3)
    with training(run_dir, "--resume") as run:
        assert_ends_as(expected, run)
        assert f"{last} is damaged: model.pt has {size // 2} bytes instead of {size}" in run.output
        assert f"{before_last} is damaged: optimizer.pt has other content than was written (SHA-256)" in run.output
        assert (run_dir / storage.FOLDER / f"damaged-{last.name}").is_dir()

    for path in list_checkpoints(run_dir / storage.FOLDER):
        os.truncate(path / MANIFEST, 0)
    before = sorted(os.listdir(run_dir / storage.FOLDER))
    with training(run_dir, "--auto-resume") as run:
        line = refusal_of(run)
        assert line.startswith(f"error: {run_dir / storage.FOLDER} holds no checkpoint that is whole (")
        assert line.endswith("restore a copy, or start again with --overwrite")
        assert sorted(os.listdir(run_dir / storage.FOLDER)) == before


def test_a_loader_worker_that_is_killed(tmp_path: Path, expected: dict[str, Any]) -> None:
    """A killed loader worker ends the run with one line; the run then continues from its checkpoint.

    Claim (ddp/resilience/README.md): a killed loader worker, a full `/dev/shm`, and a full or read-only disk are one line
    each, and the run continues from its checkpoint.
    """
    run_dir = tmp_path / "run"
    with training(run_dir, "--workers", "2") as run:
        run.wait_for_step(4)
        victim, *_ = sorted(run.workers(rank=1), key=psutil.Process.create_time)  # those that evaluate come later
        kill([victim])
        assert re.match(
            rf"error: \[rank 1\] (loader worker \(pid {victim.pid}\) was killed|"
            r"a loader worker was killed while it handed over a batch): ",
            refusal_of(run),
        )
        assert_nothing_left(run)
    finish(run_dir, expected, "--workers", "2")


def test_shared_memory_that_is_full(tmp_path: Path, expected: dict[str, Any]) -> None:
    """A full ``/dev/shm`` ends the run with one line; the run then continues.

    Claim (ddp/resilience/README.md): a killed loader worker, a full `/dev/shm`, and a full or read-only disk are one line
    each, and the run continues from its checkpoint.
    """
    run_dir = tmp_path / "run"
    if not can_mount():
        pytest.skip("no mount namespace can be made here")
    limit = (sys.executable, "-m", "tests.support.harm.disk", "tiny_shared_memory")
    with training(run_dir, "--workers", "2", before=limit) as run:
        line = refusal_of(run)
        assert "shared memory" in line
        assert "--shm-size" in line
        assert_nothing_left(run)
    with training(run_dir, "--workers", "2", "--auto-resume") as run:
        assert_ends_as(expected, run)


def poison(victim: int, steps: Sequence[int]) -> None:
    """Give a rank images of nan in these steps."""
    train_step, to_input = train.train_step, ImageData.to_input

    def all_nan(*arguments: Any) -> Tensor:
        return to_input(*arguments).fill_(torch.nan)

    def poisoned(job: Job, batches: Any) -> None:
        is_hit = job.env.rank == victim and job.step in steps
        with mock.patch.object(ImageData, "to_input", all_nan if is_hit else to_input):
            train_step(job, batches)

    mock.patch.object(train, "train_step", poisoned).start()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_steps_with_nan_on_one_rank_are_skipped_by_all(tmp_path: Path, precision: str) -> None:
    """Steps with nan on one rank are skipped by all.

    Claim (ddp/resilience/README.md): in a run, steps with nan on one rank are skipped by all, and too many end it.
    """
    run_dir = tmp_path / "run"
    flags = ("--precision", precision, "--check-replicas-every", "5")
    with forked_training(run_dir, *flags, plant=functools.partial(poison, 1, [5, 6, 24])) as run:
        run.finish()
        assert_nothing_left(run)
    result = outcome(run_dir)
    assert result[".progress.skipped_steps"] == 3
    assert result[".at[1]"] == STEPS
    if precision == "fp16":
        assert result[".progress.scaler.scale"] == 2**13  # halved each time
    assert_finite(newest(run_dir)[0])
    skipped = [record for record in read_metrics(run_dir) if record["kind"] == "skipped"]
    assert [record["step"] for record in skipped] == [6, 7, 25]  # steps that are done are counted from 1
    for record in skipped:
        ((healthy,), (poisoned,)) = record["losses"]
        assert math.isfinite(healthy)
        assert poisoned == "nan"
        assert len(set(record["samples"])) == 24
    told = (run_dir / "logs" / "rank0.log").read_text()
    assert told.count("the loss was nan on rank 1 at step") == told.count("that step is skipped") == 3


def test_too_many_steps_with_nan(tmp_path: Path) -> None:
    """A run with too many skipped steps ends with one line.

    Claim (ddp/resilience/README.md): in a run, steps with nan on one rank are skipped by all, and too many end it.
    """
    run_dir = tmp_path / "run"
    plant = functools.partial(poison, 0, range(7, 12))
    with forked_training(run_dir, "--max-skipped-steps", "2", plant=plant) as run:
        assert run.exit_statuses() == [2, 2]
        assert only_error(run).startswith(
            "error: the loss was nan on rank 0 at step 10: 3 steps had to be skipped, more than --max-skipped-steps 2: "
        )
        assert_nothing_left(run)
    checkpoint, manifest = newest(run_dir)
    assert manifest.step == 6  # none is written after a step that was skipped
    assert_finite(checkpoint)


def test_two_runs_on_one_directory(tmp_path: Path, expected: dict[str, Any]) -> None:
    """A second run in the directory of a running one is refused.

    Claim (ddp/resilience/README.md): a second run in the same directory is refused.
    """
    run_dir = tmp_path / "run"
    with training(run_dir) as first:
        assert first.until((run_dir / CONFIG_FILE).exists)
        first.ranks()[0].send_signal(signal.SIGSTOP)  # so that it does not end first
        holder = first.ranks()[0].pid
        with training(run_dir, "--auto-resume") as second:
            assert refusal_of(second).startswith(f"error: --run-dir {run_dir} is in use by process {holder} on ")
        kill(VICTIMS["everything"](first))
        assert first.seconds_to_end(10) is not None
        with training(run_dir, "--auto-resume") as third:
            assert_ends_as(expected, first, second, third)


def test_torchrun_is_killed_alone(tmp_path: Path, expected: dict[str, Any]) -> None:
    """When torchrun alone is killed, its ranks end, and the next start is not refused.

    Its ranks lived on, and the next start was refused.

    Claim (ddp/resilience/README.md): a lock that is removed during a run, and a torchrun that is killed alone, harm no run.
    """
    run_dir = tmp_path / "run"
    with training(run_dir) as first:
        first.wait_for_step(4)
        ranks = list(first.ranks().values())
        first.torchrun.kill()
        _, alive = psutil.wait_procs(ranks, timeout=15)
        assert not alive
        assert "has ended without its ranks, most likely by SIGKILL" in first.output
        with training(run_dir, "--auto-resume") as second:
            assert_ends_as(expected, first, second)


def test_a_lock_that_is_removed_while_a_run_goes_on(tmp_path: Path) -> None:
    """A run goes on when its lock is removed.

    Claim (ddp/resilience/README.md): a lock that is removed during a run, and a torchrun that is killed alone, harm no run.
    """
    run_dir = tmp_path / "run"
    with training(run_dir, "--checkpoint-every", "1") as run:
        run.wait_for_step(2)
        (run_dir / LOCK_FILE).unlink()
        assert "lock is no longer this run's but that of no process" in refusal_of(run)


@contextlib.contextmanager
def training_on(hosts: TwoHosts, run_dir: Path, *flags: str) -> Iterator[list[LaunchedRun]]:
    """:func:`training` with a rank on each host; the agents are told where they meet, and which they are."""
    meet = ("--nnodes=2", f"--master-addr={hosts.a.address}", "--master-port=29500")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                training(run_dir, *flags, ranks=1, torchrun=(*meet, f"--node-rank={number}"), before=host.command)
            )
            for number, host in enumerate((hosts.a, hosts.b))
        ]


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_network_that_is_cut(tmp_path: Path, expected: dict[str, Any]) -> None:
    """A cut network ends the run with a line that names the rank that cannot be reached.

    Claim (ddp/resilience/README.md): a cut network is named.
    """
    run_dir = tmp_path / "run"
    with two_hosts() as hosts:
        with training_on(hosts, run_dir, "--timeout", "10") as runs:
            runs[0].wait_for_step(4)
            hosts.unplug()
            for run in runs:
                assert run.wait() == 1, run.output
            assert re.search(
                r"rank 1 \(host \S+, pid \d+\) did not arrive in .* of step \d+ within 10 s", runs[0].output
            )
            assert f"the job's store at MASTER_ADDR {hosts.a.address} does not answer" in runs[1].output
        hosts.plug_in()
        with training_on(hosts, run_dir, "--resume") as runs:
            runs[0].finish()
            assert_ends_as(expected, *runs)
