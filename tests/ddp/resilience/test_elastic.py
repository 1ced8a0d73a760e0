"""torchrun starts a job again after a rank or a node was lost, or a node has come: it goes on from its newest checkpoint."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.training.metrics import read_metrics
from tests.support.harm.kill import JOB, forked_training, steps_done, training, wait_for_step
from tests.support.harm.left import assert_ends_as, litter, outcome
from tests.support.launch import free_port, start_command

pytestmark = pytest.mark.faults

# Weights that do not depend on how many ranks there are, but for rounding.
AT_ANY_WORLD_SIZE = ("--sync-batchnorm", "--dropout", "0")

# torchrun's agent would keep its store over restarts, in which ranks find the addresses of those that died, and a node that
# comes later waits for an address that is not written again (torch 2.15, elastic/rendezvous/dynamic_rendezvous.py).
NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tmp_path: Path, victim: int) -> None:
    """A killed rank costs the steps since the last checkpoint.

    Claim (ddp/resilience/README.md): a rank that is killed costs the steps since the last checkpoint.
    """
    with forked_training(tmp_path / "undisturbed") as undisturbed:
        undisturbed.finish()
    # --overwrite is for the first start alone: checkpoints that the job has saved since are its own.
    restarts = ("--standalone", "--max-restarts=3")
    with training(tmp_path / "run", "--overwrite", torchrun=restarts, env=NEW_STORES) as run:
        run.wait_for_step(12)
        run.ranks()[victim].kill()
        assert_ends_as(outcome(undisturbed.run_dir), run)
        (resumed,) = re.findall(r"resuming after step (\d+),", run.output)
        assert int(resumed) >= 9 and int(resumed) % 3 == 0


# 220 steps of a tenth of a second: time for a node to go and for another to come.
LONG = ("--train-samples", "2880", "--batch-size", "144", "--epochs", "11", "--lr", "0.01", "--checkpoint-every", "5")
LONG_STEPS = 220


@contextlib.contextmanager
def agent(port: int, output: Path, *job: str, holds_store: bool) -> Iterator[subprocess.Popen[str]]:
    """torchrun as on a node of its own, of which the job has one or two; killed, with its rank, at the end of the block.

    :param holds_store: the job ends with the agent that does
    """
    conf = f"is_host={int(holds_store)},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    flags = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=elastic", f"--rdzv-conf={conf}")
    command = ("torch.distributed.run", "--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", *flags, *job)
    with start_command(*command, env=NEW_STORES, output=output) as process:
        yield process


@pytest.mark.slow
def test_a_node_goes_and_another_comes(tmp_path: Path) -> None:
    """A job of several nodes goes on when one node leaves, and when another joins.

    Claim (ddp/resilience/README.md): a node may leave or join.
    """
    folder = tmp_path / "run"
    port = free_port()
    job = ("-m", "ddp.train", *JOB, *LONG, *AT_ANY_WORLD_SIZE, "--run-dir", str(folder))
    with agent(port, tmp_path / "first", *job, holds_store=True) as first:
        with agent(port, tmp_path / "second", *job, holds_store=False):
            wait_for_step(folder, 40)
        wait_for_step(folder, steps_done(folder) + 10)
        with agent(port, tmp_path / "third", *job, holds_store=False) as third:
            assert (first.wait(240), third.wait(60)) == (0, 0), (tmp_path / "first").read_text()
    sizes = re.findall(
        r" (\d+) ranks x", "".join((tmp_path / name).read_text() for name in ("first", "second", "third"))
    )
    assert sorted(sizes) == ["1", "2", "2"]  # each said once, by rank 0
    records = [record for record in read_metrics(folder) if record["kind"] == "step"]
    assert [record["step"] for record in records] == list(range(1, LONG_STEPS + 1))
    with forked_training(tmp_path / "undisturbed", *LONG, *AT_ANY_WORLD_SIZE) as run:
        run.finish(240)
    expected = [record for record in read_metrics(run.run_dir) if record["kind"] == "step"]
    losses, expected_losses = ([record["loss"] for record in each] for each in (records, expected))
    np.testing.assert_allclose(losses, expected_losses, atol=0.01)
    assert not litter(folder)
