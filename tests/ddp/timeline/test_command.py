"""``python -m ddp.timeline``: the spans of a step of replicas, the parts that follow from them, the picture and the trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.errors import UsageError
from common.reporting.clock import clock_of
from common.reporting.spans import Recorder, Span, in_lane
from ddp.all_reduce.backend import Backend
from ddp.timeline import __main__ as timeline
from ddp.timeline.__main__ import measure
from ddp.timeline.config import StepTimelineConfig
from ddp.timeline.parts import COMPUTE, divide, phase
from ddp.timeline.recording import RecordedBackend
from tests.support.fake_gpu import TimedGPU, pretend_gpus
from tests.support.launch import run_command
from tests.support.user_errors import UserError

PHASES = ("data", "forward", "backward", "optimizer")


def check_order(ranks: list[list[Span]], buckets: list[dict[str, int]]) -> None:
    """Check the order of all that happens in a step: each gradient is computed and copied, each bucket is sent and awaited."""
    names = {name for bucket in buckets for name in bucket}
    for step in ranks:
        phases = [phase(step, name) for name in PHASES]
        assert all(before.end <= after.start for before, after in itertools.pairwise(phases))
        laps = [span for span in in_lane(step, COMPUTE) if span.name not in (*PHASES, "step")]
        assert all(before.end == after.start for before, after in itertools.pairwise(laps))
        assert phases[2].start <= laps[0].start < laps[-1].end <= phases[2].end
        assert {lap.name for lap in laps[:-1:2]} == names
        assert {lap.name for lap in laps[1:-1:2]} == {"copy"}
        assert laps[-1].name == "wait"
        ready = {lap.name: lap.end for lap in laps}
        sent = in_lane(step, "all-reduce")
        assert [span.name for span in sent] == [f"bucket {number + 1}" for number in range(len(buckets))]
        for bucket, span in zip(buckets, sent, strict=True):
            assert max(ready[name] for name in bucket) < span.start < span.end < phases[2].end
    for same in zip(*(in_lane(step, "all-reduce") for step in ranks), strict=True):
        assert max(span.start for span in same) < min(
            span.end for span in same
        )  # a sum ends after every rank has started it


@pytest.mark.parametrize(
    ("changes", "buckets"),
    [
        ({"all_reduce": "backend", "bucket_mib": 0.01}, 4),
        ({"all_reduce": "shared-memory", "bucket_mib": 1000}, 1),
        pytest.param({"all_reduce": "ring", "ranks": 3}, 2, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_recorded_in_order(changes: dict[str, Any], buckets: int) -> None:
    run = measure(StepTimelineConfig(**{"model": "fashion-cnn", "batch_size": 12, "steps": 2, **changes}))
    ranks = changes.get("ranks", 2)
    assert len(run.facts["buckets"]) == buckets
    assert [len(step) for step in run.steps] == [ranks] * 2
    assert [len(seconds) for seconds in run.facts["backward_alone"]] == [ranks] * 2
    for step in run.steps:
        check_order(step, run.facts["buckets"])
    assert all(a[0].end <= b[0].start for a, b in zip(*run.steps, strict=True))


@pytest.mark.examples
def test_the_command_writes_the_files_it_names(tmp_path: Path) -> None:
    """The command writes the files it names.

    Claim (ddp/by_hand/README.md): one step is recorded and drawn.
    """
    arguments = ("--model", "fashion-cnn", "--batch-size", "12", "--steps", "3", "--output", str(tmp_path))
    done = run_command("ddp.timeline", *arguments, timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fashion-cnn, global batch 12, 2 ranks on ")
    assert "of 3, the one of median duration" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.png", "trace.json", "steps.json"}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "bucket 2" for event in events) == 2 * 3
    written = json.loads((tmp_path / "steps.json").read_text())
    steps = [[[Span(**span) for span in rank["spans"]] for rank in step] for step in written["steps"]]
    assert min(rank[0].start for rank in steps[0]) == 0
    check_order(steps[0], written["buckets"])
    lengths = [sum(rank[0].seconds for rank in step) for step in steps]
    assert lengths[written["shown"]] == sorted(lengths)[1]
    between = []
    for rank in itertools.chain(*written["steps"]):
        parts = rank["parts"]
        assert parts["hidden"] + parts["exposed"] == pytest.approx(parts["all_reduce"])
        between.append(1 - sum(parts[name] for name in PHASES) / parts["step"])
        assert parts["compute"] + parts["exposed"] + parts["waiting"] <= parts["backward"] + 1e-9
    assert 0 <= min(between) < 0.01  # where no other program came in between


def a_step(started: int, computed: int, ended: int) -> list[Span]:
    """A rank's step with one bucket, in whole seconds; backward begins at 0 and returns at 6."""
    times = {"step": (-2, 9), "data": (-2, -1), "forward": (-1, 0), "backward": (0, 6), "optimizer": (6, 9)}
    laps = {"a": (0, computed), "copy": (computed, computed), "wait": (computed, 6)}
    spans = [Span(name, *moments, COMPUTE, {}) for name, moments in (times | laps).items()]
    return [*spans, Span("bucket", started, ended, "all-reduce", {})]


def test_what_is_not_hidden_is_exposed() -> None:
    """An all-reduce counts from its last rank's start; where a rank computes meanwhile, it is hidden."""
    names = ("compute", "waiting", "all_reduce", "hidden", "exposed")
    early, late = divide([a_step(1, 2, 5), a_step(3, 4, 6)])
    assert [early[name] for name in names] == [2, 1, 2, 0, 2]  # it waits until the late rank begins
    assert [late[name] for name in names] == [4, 0, 3, 1, 2]
    (alone,) = divide([a_step(1, 2, 5)])
    assert [alone[name] for name in names] == [2, 0, 4, 1, 3]


class FakeWork:
    """An all-reduce that ends 30 ms after what the default stream has done."""

    def __init__(self, gpu: TimedGPU) -> None:
        self._gpu, self._ends_ms = gpu, gpu.now_ms["default"] + 30

    def wait(self) -> None:
        stream = self._gpu.current
        self._gpu.now_ms[stream] = max(self._gpu.now_ms.get(stream, 0.0), self._ends_ms)


def test_the_end_of_nccls_sum_is_told_by_a_stream_that_only_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an all-reduce of NCCL is the time of an event on a stream that only waits for it.

    Claim (ddp/README.md): on a GPU: a benchmark's ranks get a GPU each, over NCCL, or share one, over gloo; times are
    those of the GPU's streams.
    """
    gpu, device = TimedGPU(monkeypatch), torch.device("cuda", 0)
    monkeypatch.setattr(dist, "all_reduce", lambda buffer, async_op: FakeWork(gpu))
    recorder = Recorder(clock_of(device))
    recorder.clock.start()
    waited = gpu.waits
    steps: Any = SimpleNamespace(recorder=recorder, name_of=lambda buffer: "bucket")
    collectives = RecordedBackend(Backend(), steps)
    buffer: Any = SimpleNamespace(device=device)
    for _ in range(2):  # backward goes on meanwhile: the second sum starts before the first has ended
        gpu.now_ms["default"] += 10
        collectives.start(buffer)
    assert gpu.now_ms["default"] == 20
    assert gpu.waits == waited
    collectives.close()
    now = recorder.clock.seconds(recorder.clock.stamp())
    moments = [(span.start - now, span.end - now) for span in recorder.read(recorder.take())]
    assert moments == [pytest.approx((-0.01, 0.02)), pytest.approx((0.0, 0.03))]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("cuda", 2)),
        ({"ranks": 1}, ("cuda", 1)),
        ({"ranks": 3}, ("cpu", 3)),
        ({"all_reduce": "ring"}, ("cpu", 2)),
        ({"strategy": "zero3"}, ("cpu", 2)),
        ({"device": "cuda", "ranks": 3}, "one rank on each of 2 usable GPUs: use --device cpu"),
        ({"device": "cuda", "all_reduce": "ring"}, "with --all-reduce backend, .* use --device cpu"),
        ({"device": "cuda", "strategy": "zero1"}, "--device cuda records --strategy handwritten .* use --device cpu"),
    ],
)
def test_where_a_step_is_recorded(
    settings: dict[str, Any], expected: tuple[str, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 2)
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            StepTimelineConfig(**settings)
    else:
        config = StepTimelineConfig(**settings)
        assert (config.device, config.ranks) == expected


@pytest.mark.gpu
def test_a_step_on_gpus(tmp_path: Path) -> None:
    """A step on GPUs is recorded with its phases in order and its all-reduces after forward."""
    batch_size = 24 * torch.cuda.device_count()
    arguments = ("--model", "resnet18", "--steps", "6", "--batch-size", str(batch_size), "--output", str(tmp_path))
    done = run_command("ddp.timeline", *arguments, timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert ", nccl, all-reduce: nccl" in done.stdout
    written = json.loads((tmp_path / "steps.json").read_text())
    for rank in itertools.chain(*written["steps"]):
        spans = [Span(**span) for span in rank["spans"]]
        phases = [phase(spans, name) for name in PHASES]
        assert all(before.end <= after.start for before, after in itertools.pairwise(phases))
        for span in in_lane(spans, "all-reduce"):
            assert phases[1].end < span.start <= span.end


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "5"), "--batch-size 144 does not divide over 5 ranks"),
        (
            ("--model", "resnet18", "--batch-size", "2"),
            "resnet18 cannot normalize a single sample per rank and micro-step",
        ),
        (("--strategy", "zero3", "--model", "mlp"), "--model mlp is for --strategy handwritten"),
        (("--strategy", "zero1", "--bucket-mib", "1"), "--bucket-mib 1.0 is for --strategy handwritten"),
        (("--strategy", "zero2", "--all-reduce", "tree"), "--all-reduce tree has no reduce-scatter and all-gather for"),
        (("--strategy", "zero3", "--ranks", "5"), "--batch-size 12 does not divide over 5 ranks"),
    ],
)
def test_a_mistake_is_one_line(user_error: UserError, arguments: tuple[str, ...], words: str) -> None:
    assert words in user_error(timeline.main, *arguments)
