"""``python -m ddp.timeline``: the moments of a step, what follows from them, the picture and the trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UsageError
from common.reporting.clock import clock_of
from ddp.all_reduce.backend import Backend
from ddp.timeline import __main__ as timeline
from ddp.timeline.__main__ import RecordedSteps, measure, trace_events
from ddp.timeline.config import StepTimelineConfig
from ddp.timeline.figure import lanes, plot_step
from ddp.timeline.overlap import Interval, after, divide, length, union
from ddp.timeline.recording import RecordingNCCL, Sending, Step
from tests.support.launch import run_command
from tests.support.timed_gpu import TimedGPU, pretend_gpus
from tests.support.user_errors import UserError

SMALL = {"model": "fashion-cnn", "batch_size": 12, "steps": 2}
NANOSECOND = (
    1e-3  # in microseconds; the clock's resolution, far above what rounding adds to the sum of a start and a duration
)


def check_moments(steps: list[list[Step]], buckets: list[dict[str, int]], parameters: list[str]) -> None:
    """Check the order of all moments on every rank."""
    assert sorted(itertools.chain(*buckets)) == sorted(parameters)
    for step in steps:
        for rank in step:
            assert rank.began <= rank.loaded <= rank.forwarded < min(rank.ready)
            assert rank.computed < rank.returned < rank.ended
            ready, handled = (dict(zip(parameters, moments, strict=True)) for moments in (rank.ready, rank.handled))
            in_order = sorted(parameters, key=lambda name: ready[name])
            assert all(ready[name] < handled[name] < rank.returned for name in parameters)
            assert all(handled[before] < ready[name] for before, name in itertools.pairwise(in_order))
            for bucket, sending in zip(buckets, rank.sent, strict=True):
                assert max(ready[name] for name in bucket) < sending.started < sending.ended < rank.returned
                assert sending.started < max(handled[name] for name in bucket)
            started = [sending.started for sending in rank.sent]
            assert started == sorted(started)
        for sent in zip(*(rank.sent for rank in step), strict=True):  # a sum ends after every rank has started it
            assert max(sending.started for sending in sent) < min(sending.ended for sending in sent)
    for before, following in itertools.pairwise(steps):
        assert all(a.ended <= b.began for a, b in zip(before, following, strict=True))


def check_trace(events: list[dict[str, Any]], run: RecordedSteps) -> None:
    """Check the events against the trace event format; spans of a thread must nest."""
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    for event in events:
        assert isinstance(event["name"], str)
        assert event["pid"] in run.pids
        assert isinstance(event["tid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "i" or event["s"] == "t"
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    spans: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            spans.setdefault((event["pid"], event["tid"]), []).append(event)
    assert set(spans) == named
    for lane in spans.values():
        ends: list[float] = []
        for event in sorted(lane, key=lambda event: (event["ts"], -event["dur"])):
            while ends and ends[-1] <= event["ts"] + NANOSECOND:
                ends.pop()
            ends.append(event["ts"] + event["dur"])
            assert all(inner <= outer + NANOSECOND for outer, inner in itertools.pairwise(ends))
    sent = [event for event in events if event.get("cat") == "all-reduce"]
    assert len(sent) == len(run.pids) * len(run.steps) * len(run.buckets)
    for event in sent:
        bucket = run.buckets[int(event["name"].split()[1]) - 1]
        assert event["args"] == {"bytes": sum(bucket.values()), "parameters": list(bucket)}
    ready = [event for event in events if event["ph"] == "i"]
    assert len(ready) == len(run.pids) * len(run.steps) * len(run.parameters)


@pytest.mark.parametrize(
    ("changes", "buckets"),
    [
        ({"all_reduce": "backend", "bucket_mib": 0.01}, 4),
        ({"all_reduce": "shared-memory", "bucket_mib": 1000}, 1),
        pytest.param({"all_reduce": "ring", "ranks": 3}, 2, marks=pytest.mark.slow),
        pytest.param({"ranks": 1, "model": "resnet18", "batch_size": 2}, 3, marks=pytest.mark.slow),
    ],
)
def test_moments_are_in_order(changes: dict[str, Any], buckets: int, tmp_path: Path) -> None:
    run = measure(StepTimelineConfig(**{**SMALL, **changes}))
    assert len(run.buckets) == buckets
    assert len(run.steps) == 2
    assert {len(step) for step in run.steps} == {len(run.pids)} == {changes.get("ranks", 2)}
    assert [len(seconds) for seconds in run.alone] == [2] * len(run.pids)
    check_moments(run.steps, run.buckets, run.parameters)
    origin = run.steps[0][0].began - 1
    check_trace(json.loads(json.dumps(trace_events(run, [[r.since(origin) for r in step] for step in run.steps]))), run)
    plot_step(tmp_path / "a.png", run.steps[0], divide(run.steps[0]), run.parameters, run.buckets, "a title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.examples
def test_the_command_writes_the_files_it_names(tmp_path: Path) -> None:
    arguments = ("--model", "fashion-cnn", "--batch-size", "12", "--steps", "3", "--output", str(tmp_path))
    done = run_command("ddp.timeline", *arguments, timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "fashion-cnn, global batch 12, 2 ranks of 1 thread, all-reduce: backend, 2 buckets of "
    )
    for words in (
        "rank 1",
        "  optimizer",
        "hidden: ",
        "all-reduces share the cores",
        "of 3, the one of median duration",
    ):
        assert words in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.png", "trace.json", "steps.json"}
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    written = json.loads((tmp_path / "steps.json").read_text())
    assert written["machine"]["torch"]
    steps = [
        [Step(**{**rank["moments"], "sent": [Sending(**s) for s in rank["moments"]["sent"]]}) for rank in step]
        for step in written["steps"]
    ]
    assert min(rank.began for rank in steps[0]) == 0
    check_moments(steps, written["buckets"], written["parameters"])
    lengths = [sum(rank.ended - rank.began for rank in step) for step in steps]
    assert lengths[written["shown"]] == sorted(lengths)[1]
    for rank in itertools.chain(*written["steps"]):
        parts = rank["parts"]
        assert parts["hidden"] + parts["exposed"] == pytest.approx(parts["all_reduce"])
        whole = parts["data"] + parts["forward"] + parts["backward"] + parts["optimizer"]
        assert whole == pytest.approx(parts["step"])
        assert parts["compute"] + parts["exposed"] + parts["waiting"] <= parts["backward"] + 1e-9


MOMENTS = st.integers(0, 40)
INTERVALS = st.lists(st.tuples(MOMENTS, MOMENTS).map(lambda ends: (float(min(ends)), float(max(ends)))), max_size=8)


def cells(intervals: list[Interval]) -> set[int]:
    """The unit intervals that the intervals cover."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


@given(INTERVALS, MOMENTS)
def test_intervals_are_sets_of_moments(intervals: list[Interval], moment: int) -> None:
    merged = union(intervals)
    assert length(merged) == len(cells(intervals))
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))
    assert length(after(moment, merged)) == len([cell for cell in cells(intervals) if cell >= moment])


@st.composite
def a_step(draw: st.DrawFn) -> list[Step]:
    """One step on one to three ranks, in whole seconds; each sum ends after every rank has started it."""
    ranks, buckets = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    started = [sorted(draw(st.lists(MOMENTS, min_size=buckets, max_size=buckets))) for _ in range(ranks)]
    steps = []
    for mine in started:
        sent = [
            Sending(s, max(all_) + draw(st.integers(1, 9)))
            for s, all_ in zip(mine, zip(*started, strict=True), strict=True)
        ]
        computed = draw(st.integers(1, mine[-1] + 1))
        returned = max(computed, *(sending.ended for sending in sent))
        steps.append(Step(-2.0, -1.0, 0.0, [1.0, computed], [2.0, computed], sent, returned, returned + 3))
    return steps


@given(a_step())
def test_what_is_not_hidden_is_exposed(ranks: list[Step]) -> None:
    for step, parts in zip(ranks, divide(ranks), strict=True):
        all_sent = [max(sending.started for sending in bucket) for bucket in zip(*(s.sent for s in ranks), strict=True)]
        summing = cells([(start, sending.ended) for start, sending in zip(all_sent, step.sent, strict=True)])
        sending = cells([(sending.started, sending.ended) for sending in step.sent])
        assert parts.all_reduce == parts.hidden + parts.exposed == len(summing)
        assert parts.hidden == len([cell for cell in summing if cell < step.computed])
        assert parts.waiting == len([cell for cell in sending - summing if cell >= step.computed])
        assert parts.compute + parts.exposed + parts.waiting <= parts.backward
        assert parts.step == parts.data + parts.forward + parts.backward + parts.optimizer
    if len(ranks) == 1:
        assert divide(ranks)[0].waiting == 0


@given(a_step())
def test_all_reduces_of_a_lane_follow_each_other(ranks: list[Step]) -> None:
    for step in ranks:
        chosen = lanes(step.sent)
        assert set(chosen) == set(range(max(chosen) + 1))
        for lane in set(chosen):
            mine = [sending for sending, other in zip(step.sent, chosen, strict=True) if other == lane]
            assert all(a.ended <= b.started for a, b in itertools.pairwise(mine))


class FakeWork:
    """An all-reduce that ends 30 ms after what the default stream has done."""

    def __init__(self, gpu: TimedGPU) -> None:
        self._gpu, self._ends_ms = gpu, gpu.now_ms["default"] + 30

    def wait(self) -> None:
        stream = self._gpu.current
        self._gpu.now_ms[stream] = max(self._gpu.now_ms.get(stream, 0.0), self._ends_ms)


def test_the_end_of_nccls_sum_is_told_by_a_stream_that_only_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, device = TimedGPU(monkeypatch), torch.device("cuda", 0)
    monkeypatch.setattr(dist, "all_reduce", lambda buffer, async_op: FakeWork(gpu))
    clock = clock_of(device)
    clock.start()
    waited = gpu.waits
    recording = RecordingNCCL(Backend(), clock, device)
    for _ in range(2):  # backward goes on meanwhile: the second sum starts before the first has ended
        gpu.now_ms["default"] += 10
        recording.start(torch.zeros(1))
    assert gpu.now_ms["default"] == 20
    assert gpu.waits == waited
    recording.close()
    now = clock.seconds(clock.stamp())
    moments = [(clock.seconds(s.started) - now, clock.seconds(s.ended) - now) for s in recording.sent]
    assert moments == [pytest.approx((-0.01, 0.02)), pytest.approx((0.0, 0.03))]


def test_a_step_is_read_with_all_its_moments() -> None:
    step = Step(1, 2, 3, [4, 5], [6, 7], [Sending(8, 9)], 10, 11)
    assert step.read(lambda moment: -moment) == Step(-1, -2, -3, [-4, -5], [-6, -7], [Sending(-8, -9)], -10, -11)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, ("cuda", 2)),
        ({"ranks": 1}, ("cuda", 1)),
        ({"device": "cpu"}, ("cpu", 2)),
        ({"ranks": 3}, ("cpu", 3)),
        ({"all_reduce": "ring"}, ("cpu", 2)),
        ({"strategy": "zero3"}, ("cpu", 2)),
        ({"device": "cuda", "ranks": 3}, "--ranks 3 is more than the 2 usable GPUs"),
        ({"device": "cuda", "all_reduce": "ring"}, "--all-reduce ring sums tensors of the CPU"),
        ({"device": "cuda", "strategy": "zero1"}, "--device cuda is for --strategy handwritten: zero1"),
    ],
)
def test_where_a_step_is_recorded(
    settings: dict[str, Any], found: tuple[str, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 2)
    if isinstance(found, str):
        with pytest.raises(UsageError, match=found):
            StepTimelineConfig(**settings)
    else:
        config = StepTimelineConfig(**settings)
        assert (config.device, config.ranks) == found


@pytest.mark.gpu
def test_a_step_on_gpus(tmp_path: Path) -> None:
    batch_size = 24 * torch.cuda.device_count()
    arguments = ("--model", "resnet18", "--steps", "6", "--batch-size", str(batch_size), "--output", str(tmp_path))
    done = run_command("ddp.timeline", *arguments, timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert ", nccl, all-reduce: backend" in done.stdout
    written = json.loads((tmp_path / "steps.json").read_text())
    for rank in itertools.chain(*written["steps"]):
        moments = rank["moments"]
        in_order = [moments[name] for name in ("began", "loaded", "forwarded", "returned", "ended")]
        assert in_order == sorted(in_order)
        assert moments["forwarded"] < min(moments["ready"]) <= max(moments["ready"]) <= moments["returned"]
        for sending in moments["sent"]:
            assert moments["forwarded"] < sending["started"] <= sending["ended"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "mpl"), "--model: invalid choice: 'mpl'"),
        (("--all-reduce", "rign"), "--all-reduce: invalid choice: 'rign'"),
        (("--ranks", "0"), "--ranks 0 is out of range: it must be at least 1"),
        (("--ranks", "5"), "--batch-size 144 does not divide over 5 ranks"),
        (
            ("--model", "resnet18", "--batch-size", "2"),
            "resnet18 cannot normalize a single sample per rank and micro-step",
        ),
        (("--bucket-mib", "0"), "--bucket-mib 0.0 is out of range"),
        (("--steps", "1"), "--steps 1 is out of range"),
        (("--output", __file__), "is a file: give a folder"),
        (("--output", "/dev/null/out"), "--output /dev/null/out cannot be written"),
    ],
)
def test_a_mistake_is_one_line(user_error: UserError, arguments: tuple[str, ...], words: str) -> None:
    assert words in user_error(timeline.main, *arguments)


def test_it_is_refused_under_torchrun(user_error: UserError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "ddp.timeline is started once, and not by torchrun" in user_error(timeline.main)
