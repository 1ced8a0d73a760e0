"""The benchmark's words, from measurements that are made up."""

from __future__ import annotations

import pytest

from dataparallel.bench.variants import HANDWRITTEN, PLAIN, STEP_BY_STEP, TORCH
from dataparallel.bench.verdict import Point, crossover, explain

STEPS = {"scatter": 1.0, "replicate": 4.0, "forward": 10.0, "gather": 1.0}


def point(batch_size: int, handwritten: float, mode: str = "inference") -> Point:
    """Three rounds in ms, all alike; the plain module takes 20, and all but 1 of 17 parts of the time by hand is in the steps."""
    names = {PLAIN: 20.0, TORCH: 20.0, HANDWRITTEN: handwritten, STEP_BY_STEP: handwritten}
    steps = {name: 1e-3 * value * handwritten / 17 for name, value in STEPS.items()}
    return Point(mode, batch_size, {name: [1e-3 * value] * 3 for name, value in names.items()}, [steps] * 3)


def test_the_steps_and_the_rest_add_up() -> None:
    """The measured steps and the rest add up to the whole.

    Claim (dataparallel/README.md): the bench measures, draws and explains; the steps add up.
    """
    steps = point(8, 34.0).median_steps()
    assert list(steps) == [*STEPS, "rest"]
    assert sum(steps.values()) == pytest.approx(0.034)
    assert steps["rest"] == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("times", "size"),
    [((30, 25, 15), 512), ((30, 15, 15), 64), ((15, 15, 15), 8), ((15, 15, 30), None), ((15, 30, 15), 512)],
)
def test_the_crossover_is_where_all_larger_batches_are_faster(times: tuple[float, ...], size: int | None) -> None:
    points = [point(batch_size, own) for batch_size, own in zip((8, 64, 512), times, strict=True)]
    assert crossover(points, HANDWRITTEN) == size


def test_a_gain_within_the_noise_is_none() -> None:
    noisy = point(8, 15.0)
    noisy.seconds[HANDWRITTEN][:] = [0.021, 0.015, 0.022]
    assert crossover([noisy], HANDWRITTEN) is None
    lines = explain([noisy, point(8, 44.0, "training")])
    assert any(line.startswith("handwritten: within the noise as fast as the plain module; at best") for line in lines)


def test_the_verdict_names_the_batch_size_from_which_it_pays() -> None:
    text = "\n".join(explain([point(8, 34.0), point(512, 16.0), point(8, 44.0, "training")]))
    for words in (
        "handwritten: faster than the plain module from batch size 512 on; at best 1.25 [1.25 to 1.25]x, at batch size 512",
        "nn.DataParallel: within the noise as fast as the plain module; at best 1.00",
        "handwritten: not faster than the plain module at large batches; at best 0.45",
    ):
        assert words in text
