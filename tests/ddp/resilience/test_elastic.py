"""torchrun starts a job again after a rank or a node was lost, or a node has come: it goes on from its newest checkpoint."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.training.metrics import read_metrics
from tests.support.harm.kill import LaunchedRun, forked_training, training
from tests.support.harm.left import assert_ends_as, litter
from tests.support.harm.network import NEW_STORES, meeting
from tests.support.launch import free_port

pytestmark = pytest.mark.faults

# Weights that do not depend on how many ranks there are, but for rounding.
AT_ANY_WORLD_SIZE = ("--sync-batchnorm", "--dropout", "0")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(
    tmp_path: Path, undisturbed: dict[str, Any], victim: int
) -> None:
    """A killed rank costs the steps since the last checkpoint.

    Claim (ddp/resilience/README.md): a rank that is killed costs the steps since the last checkpoint.
    """
    # --overwrite is for the first start alone: checkpoints that the job has saved since are its own.
    restarts = ("--standalone", "--max-restarts=3")
    with training(tmp_path / "run", "--overwrite", torchrun=restarts, env=NEW_STORES) as run:
        run.wait_for_step(12)
        run.ranks()[victim].kill()
        assert_ends_as(undisturbed, run)
        (resumed,) = re.findall(r"resuming after step (\d+),", run.output)
        assert int(resumed) >= 9 and int(resumed) % 3 == 0


# 220 steps of a tenth of a second: time for a node to go and for another to come.
LONG = ("--train-samples", "2880", "--batch-size", "144", "--epochs", "11", "--lr", "0.01", "--checkpoint-every", "5")
LONG_STEPS = 220


@pytest.mark.slow
@pytest.mark.timeout(600)  # three waits of up to 240 s; on cores that others use, it needs more than the usual 300 s
def test_a_node_goes_and_another_comes(tmp_path: Path) -> None:
    """A job of several nodes goes on when one node leaves, and when another joins.

    Claim (ddp/resilience/README.md): a node may leave or join.
    """
    folder, endpoint = tmp_path / "run", f"localhost:{free_port()}"

    def node(holds_store: bool = False) -> contextlib.AbstractContextManager[LaunchedRun]:
        torchrun = meeting(endpoint, "1:2", holds_store)
        return training(folder, *LONG, *AT_ANY_WORLD_SIZE, ranks=1, torchrun=torchrun, env=NEW_STORES)

    with node(holds_store=True) as first:
        with node() as second:
            first.wait_for_step(40)
            said = second.output
        first.wait_for_step(first.step() + 10)
        with node() as third:
            assert (first.wait(240), third.wait(60)) == (0, 0), first.output
            said += first.output + third.output
    assert sorted(re.findall(r" (\d+) ranks x", said)) == ["1", "2", "2"]  # each said once, by rank 0
    records = [record for record in read_metrics(folder) if record["kind"] == "step"]
    assert [record["step"] for record in records] == list(range(1, LONG_STEPS + 1))
    with forked_training(tmp_path / "undisturbed", *LONG, *AT_ANY_WORLD_SIZE) as run:
        run.finish(240)
    expected = [record for record in read_metrics(run.run_dir) if record["kind"] == "step"]
    losses, expected_losses = ([record["loss"] for record in each] for each in (records, expected))
    np.testing.assert_allclose(losses, expected_losses, atol=0.01)
    assert not litter(folder)
