"""ddp/ladder: rungs that differ by one change, train alike, and are reported with what limits them."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from common.data.datasets import ImageData, load
from ddp.ladder.__main__ import LadderConfig, report
from ddp.ladder.rungs import BATCH_SIZE, RungTraining, Turn, rungs
from ddp.rendezvous.process_group import process_group
from tests.ddp.jobs import assert_close, assert_identical
from tests.support.launch import run_command, run_ranks

STEPS = 3


def train(names: list[str], data: ImageData) -> dict[str, dict[str, npt.NDArray[np.float32]]]:
    """The weights of rungs after a few steps."""
    ended = {}
    with process_group() as env:
        for name in names:
            training = RungTraining(env, rungs()[name], data)
            for _ in range(STEPS):
                training.run(1)
            ended[name] = {key: value.detach().numpy().copy() for key, value in training._network.named_parameters()}
    return ended


def test_each_rung_is_the_one_before_with_one_change() -> None:
    for before, rung in itertools.pairwise(rungs().values()):
        changed = [
            field.name for field in dataclasses.fields(rung) if getattr(before, field.name) != getattr(rung, field.name)
        ]
        assert len(changed) == 1


@pytest.mark.examples
def test_rungs_in_fp32_train_alike() -> None:
    """The single process's rungs see the same batches and end alike; those on two ranks end with the same bits."""
    data = load("glyphs", train_samples=STEPS * BATCH_SIZE, test_samples=100)
    names = {
        ranks: [name for name, rung in rungs().items() if (rung.ranks, rung.precision) == (ranks, "fp32")]
        for ranks in (1, 2)
    }
    first, *others = run_ranks(train, 1, names[1], data)[0].values()
    for weights in others:
        # A bias before BatchNorm has a gradient of rounding alone, of which Adam makes whole steps.
        biases = {name: value for name, value in first.items() if name.endswith("bias")}
        assert_close(weights | biases, first, 1e-3)
    for rank in run_ranks(train, 2, names[2], data):
        plain, *others = rank.values()
        for weights in others:
            assert_identical(weights, plain)


def test_the_report_names_the_gains_and_what_limits_a_rung(tmp_path: Path) -> None:
    """Rates, gains and shares are those of the turns."""
    turns = {name: [Turn(0.144 / 2**i, 0.5, 0.25, 0.0)] * 3 for i, name in enumerate(rungs())}
    _, _, first, second, *_, ladder, _ = report(LadderConfig(output=tmp_path), turns).splitlines()
    assert "1,000 [1,000 to 1,000]" in first and first.endswith("50% loading, 25% kernel, 0% idle")
    assert " 2.00 " in second
    assert ladder == "the last rung by the first: 128.00 [128.00 to 128.00]; the product of the gains: 128.00"
    assert {path.name for path in tmp_path.iterdir()} == {"ladder.json", "ladder.png"}


@pytest.mark.examples
def test_the_command(tmp_path: Path) -> None:
    """A short climb measures all rungs."""
    flags = f"--dataset glyphs --train-samples {4 * BATCH_SIZE} --epochs 1 --output {tmp_path}"
    done = run_command("ddp.ladder", *flags.split(), timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in rungs())
