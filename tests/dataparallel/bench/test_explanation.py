"""The benchmark's words, from measurements that are made up."""

from __future__ import annotations

import re

import pytest
import torch

from dataparallel.bench.explanation import Point, crossover, explain
from dataparallel.bench.variants import HANDWRITTEN, ONE_DEVICE, PLAIN, PROCESSES, STEP_BY_STEP, TORCH, Comparison

ON_CPU = Comparison("fashion-cnn", (torch.device("cpu"),) * 2, "fp32")
INFERENCE = {"scatter": 1.0, "replicate": 4.0, "forward": 10.0, "gather": 1.0}
TRAINING = INFERENCE | {"loss": 1.0, "backward": 20.0, "reduce": 3.0, "optimizer": 2.0}


def point(batch_size: int, handwritten: float, mode: str = "inference", **others: float) -> Point:
    """Three rounds in ms, all alike; the plain module takes 20."""
    steps = TRAINING if mode == "training" else INFERENCE
    names = {PLAIN: 20.0, ONE_DEVICE: 30.0, TORCH: 20.0, HANDWRITTEN: handwritten, PROCESSES: 15.0} | others
    scale = handwritten / (sum(steps.values()) + 1)
    own = {name: value * scale / 1e3 for name, value in steps.items()}
    return Point(
        mode,
        batch_size,
        {name: [value / 1e3] * 3 for name, value in names.items()},
        HANDWRITTEN,
        {HANDWRITTEN: [own] * 3, PROCESSES: [{"forward": 0.006}] * 3},
    )


def test_the_steps_and_the_rest_add_up() -> None:
    steps = point(8, 34.0).median_steps()
    assert list(steps) == [*INFERENCE, "rest"]
    assert sum(steps.values()) == pytest.approx(0.034)
    assert steps["rest"] == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("times", "size"),
    [((30, 25, 15), 512), ((30, 15, 15), 64), ((15, 15, 15), 8), ((15, 15, 30), None), ((15, 30, 15), 512)],
)
def test_the_crossover_is_where_all_larger_batches_are_faster(times: tuple[float, ...], size: int | None) -> None:
    points = [point(batch_size, taken) for batch_size, taken in zip((8, 64, 512), times, strict=True)]
    assert crossover(points, HANDWRITTEN) == size


def test_a_gain_at_small_batches_alone_is_told() -> None:
    text = "\n".join(explain(ON_CPU, [point(8, 15.0), point(512, 34.0)]))
    assert "handwritten: faster than the plain module at batch size 8, but not at larger ones; at best 1.33" in text


def test_disturbed_measurements_are_doubted() -> None:
    quiet = [point(8, 15.0), point(512, 34.0)]
    assert "do not trust this" not in "\n".join(explain(ON_CPU, quiet))
    noisy = [point(8, 15.0), point(512, 34.0)]
    noisy[0].seconds[PLAIN][:] = [0.02, 0.02, 0.2]
    noisy[1].seconds[PROCESSES][:] = [0.001] * 3
    text = "\n".join(explain(ON_CPU, noisy))
    assert "plain module at 8 took 20.0 to 110.0 ms" in text
    assert "processes at 512 took less time than at 8" in text


def test_a_gain_within_the_noise_is_none() -> None:
    noisy = point(8, 15.0)
    noisy.seconds[HANDWRITTEN][:] = [0.021, 0.015, 0.022]
    assert crossover([noisy], HANDWRITTEN) is None


def test_what_is_said_of_cpu_threads() -> None:
    text = "\n".join(explain(ON_CPU, [point(8, 34.0), point(512, 16.0), point(8, 44.0, "training")]))
    for words in (
        "'handwritten' uses 2 threads of this process as devices",
        "handwritten: faster than the plain module from batch size 512 on; at best 1.25 [1.25 to 1.25]x",
        "processes: faster than the plain module from batch size 8 on",
        "2 devices by hand are 1.88 [1.88 to 1.88]x as fast as one of them, at batch size 512",
        "replicate, 8.00 ms (24 %): 5.9 MB of parameters and buffers go to 1 further device in every call",
        "20.00 ms, the same parts in 2 processes 6.00: 14.00 ms are lost because threads share one process. ",
        "the gradients come back: reduce, 3.07 ms (7 %). Processes keep their replicas, and all-reduce",
        "autograd runs one replica's backward pass after the other's",
        f"processes, each with {max(1, torch.get_num_threads() // 2)} intra-op thread",
        "loss, 1.02 ms (2 %), and optimizer, 2.05 ms (5 %): in the calling thread",
    ):
        assert words in text
    assert re.search(r"the steps, of the measured time +100 % +100 %", text)
    assert "'nn.DataParallel' passes its input through" in text


def test_what_is_said_of_gpus() -> None:
    gpus = Comparison("fashion-cnn", (torch.device("cuda", 0), torch.device("cuda", 1)), "fp32")
    measured = point(8, 34.0, "training", **{STEP_BY_STEP: 36.0})
    del measured.seconds[ONE_DEVICE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comparison, "megabytes", 5.9)
        text = "\n".join(explain(gpus, [measured]))
    assert (
        "nn.DataParallel: never faster than the plain module on this machine, at these batch sizes; at best 1.00"
        in text
    )
    assert "autograd has a thread for each GPU" in text
    assert "on the first device, while the others idle" in text
    assert "threads of this process" not in text
