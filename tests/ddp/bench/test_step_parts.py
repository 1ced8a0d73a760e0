"""ddp/bench/step_parts.py: the parts of a step's time."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from common.distributed.process_group import process_group
from common.distributed.worker_group import WorkerGroup
from common.training.recipes import load_dataset
from ddp.bench.step_parts import Runner, Stamps, StepParts
from ddp.config import TrainConfig
from tests.ddp.jobs import small
from tests.support.launch import run_ranks

DURATION = st.floats(0, 10)


@given(st.lists(st.lists(st.tuples(*[DURATION] * 5), min_size=3, max_size=3), min_size=1, max_size=4))
@settings(deadline=None, max_examples=50)
def test_the_parts_add_up_to_the_step(ranks: list[list[tuple[float, ...]]]) -> None:
    """For all times of the ranks. Every rank leaves the all-reduce after the last one is ready."""
    stamps = []
    for steps in ranks:
        own = []
        for number, (began, waiting, computing, _, _) in enumerate(steps):
            all_ready = max(sum(other[number][:3]) for other in ranks)
            reduced = all_ready + steps[number][3]
            own.append(Stamps(began, waiting, began + waiting + computing, reduced, reduced + steps[number][4]))
        stamps.append(own)
    parts = StepParts.of(stamps)
    mean = sum(one.ended - one.began for own in stamps for one in own) / sum(map(len, stamps))
    assert sum(parts) == pytest.approx(mean)
    assert min(parts) >= -1e-9


def test_a_late_rank_is_imbalance_and_not_communication() -> None:
    on_time = Stamps(0.0, 1.0, 4.0, 9.0, 10.0)
    late = Stamps(0.0, 1.0, 8.0, 9.0, 10.0)
    assert StepParts.of([[on_time], [late]]) == StepParts(
        input=1.0, compute=5.0, imbalance=2.0, communication=1.0, update=1.0
    )


def test_what_holds_up_the_backward_pass_is_communication_and_not_compute() -> None:
    """Time in which backward waits for a bucket counts as communication, and compute does not.

    Claim (ddp/README.md, 4): what holds up the backward pass is communication.
    """
    held_up = Stamps(0.0, 1.0, 8.0, 9.0, 10.0, stalled=3.0)
    assert StepParts.of([[held_up]]) == StepParts(input=1.0, compute=4.0, imbalance=0.0, communication=4.0, update=1.0)


SEEN: list[str] = []


class Event:
    """A CUDA event. Between any two of them, the stream is held up for 250 ms."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        SEEN.append("event")

    def elapsed_time(self, other: Event) -> float:
        return 250.0


class AllReduce:
    """One that was begun."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def get_future(self) -> torch.futures.Future[Any]:
        SEEN.append("future")
        return self._work.get_future()


def step_on_a_gpu() -> tuple[list[str], float]:
    """What a step calls, and for how long it was held up, as if the rank had a GPU."""
    with process_group() as env, contextlib.ExitStack() as patches:
        config: TrainConfig = small(epochs=10**6)
        runner = Runner(env, config, load_dataset(config), "ddp", 1)
        runner.run(2)  # after which the buckets stay
        all_reduce: Any = dist.all_reduce
        gpu = dataclasses.replace(env, device=torch.device("cuda", 0))
        for owner, name, replacement in (
            (torch.cuda, "Event", Event),
            (torch.cuda, "current_stream", mock.Mock()),
            (torch.cuda, "synchronize", mock.Mock()),
            (dist, "all_reduce", lambda tensor, async_op: AllReduce(all_reduce(tensor, async_op=async_op))),
            (runner, "_env", gpu),
        ):
            patches.enter_context(mock.patch.object(owner, name, replacement))
        (stamps,) = runner.run(1)
        return SEEN, stamps.stalled


def test_the_wait_for_a_future_is_measured_but_for_the_last_bucket_s() -> None:
    """The wait for each bucket's future is measured, except for the last one, after all is computed.

    Whose wait comes after everything is computed.

    Claim (ddp/README.md, 4): what holds up the backward pass is communication.
    """
    for seen, stalled in run_ranks(step_on_a_gpu, 2, fresh=True):
        buckets = seen.count("future")
        assert buckets > 1
        assert seen == ["event", "future", "event"] * (buckets - 1) + ["future"]
        assert stalled == 0.25 * (buckets - 1)


@pytest.mark.parametrize(
    ("wrapper", "ranks"),
    [
        ("handwritten", 1),
        ("ddp", 2),
        pytest.param("none", 1, marks=pytest.mark.slow),
        pytest.param("ddp", 1, marks=pytest.mark.slow),
    ],
)
def test_real_steps_are_stamped_in_order(wrapper: str, ranks: int) -> None:
    config: TrainConfig = small(epochs=10**6)
    with WorkerGroup(ranks, Runner, config, load_dataset(config), wrapper, 2) as job:
        stamps = job.call("run", 3)
    assert [len(own) for own in stamps] == [3] * ranks
    for own in stamps:
        for one in own:
            assert one.began < one.began + one.input < one.ready <= one.reduced < one.ended
    parts = StepParts.of(stamps)
    assert (parts.communication > 0) == (wrapper != "none")
    assert (parts.imbalance > 0) == (ranks > 1)
