"""The benchmark's words, from measurements that are made up."""

from __future__ import annotations

import pytest

from dataparallel.bench.config import DataParallelBenchConfig
from dataparallel.bench.explanation import Point, crossover, explain
from dataparallel.bench.variants import HANDWRITTEN, ONE_DEVICE, PLAIN, PROCESSES, TORCH

ON_CPU = DataParallelBenchConfig(devices="cpu,cpu", batch_sizes=(8, 512))
INFERENCE = {"scatter": 1.0, "replicate": 4.0, "forward": 10.0, "gather": 1.0}
TRAINING = INFERENCE | {"loss": 1.0, "backward": 20.0, "reduce": 3.0, "optimizer": 2.0}


def point(batch_size: int, handwritten: float, mode: str = "inference", **others: float) -> Point:
    """Three rounds in ms, all alike; the plain module takes 20."""
    steps = TRAINING if mode == "training" else INFERENCE
    names = {PLAIN: 20.0, ONE_DEVICE: 30.0, TORCH: 20.0, HANDWRITTEN: handwritten, PROCESSES: 15.0} | others
    scale = handwritten / (sum(steps.values()) + 1)
    own = {name: value * scale / 1e3 for name, value in steps.items()}
    return Point(mode, batch_size, {name: [value / 1e3] * 3 for name, value in names.items()}, HANDWRITTEN, [own] * 3)


def test_the_steps_and_the_rest_add_up() -> None:
    """The measured steps and the rest add up to the whole.

    Claim (dataparallel/README.md): the bench measures, draws and explains; the steps add up.
    """
    steps = point(8, 34.0).median_steps()
    assert list(steps) == [*INFERENCE, "rest"]
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
    lines = explain(ON_CPU, [noisy, point(8, 44.0, "training")])
    assert any(line.startswith("handwritten: within the noise as fast as the plain module; at best") for line in lines)


def test_a_disturbed_measurement_has_no_verdict() -> None:
    points = [point(8, 34.0), point(512, 16.0), point(8, 44.0, "training")]
    assert [line for line in explain(ON_CPU, points) if line not in explain(ON_CPU, points, disturbed=True)] == [
        line for line in explain(ON_CPU, points) if "plain module" in line and "at best" in line
    ]


def test_the_words_on_cpu_threads() -> None:
    """The explanation of CPU devices names the batch size from which each variant wins, and the steps."""
    text = "\n".join(explain(ON_CPU, [point(8, 34.0), point(512, 16.0), point(8, 44.0, "training")]))
    for words in (
        "CPU devices are threads of this process.",
        "handwritten: faster than the plain module from batch size 512 on; at best 1.25 [1.25 to 1.25]x, at batch size 512",
        "processes: faster than the plain module from batch size 8 on",
        "nn.DataParallel: within the noise as fast as the plain module; at best 1.00",
    ):
        assert words in text
