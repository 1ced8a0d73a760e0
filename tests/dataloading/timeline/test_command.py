"""``dataloading.timeline``: its traces of the loaders, the picture, and the command."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataloading.synthetic import face_cache
from dataloading.timeline import __main__ as timeline
from dataloading.timeline.__main__ import LoadingTimelineConfig, measure
from dataloading.timeline.figure import plot_timeline
from dataloading.timeline.tracing import LoaderTrace, Span, Tracer, trace_events
from tests.support.launch import run_command, start_command
from tests.support.user_errors import UserError

BATCHES, BATCH_SIZE, LATE = 6, 4, 2
STAGES = {"open", "read", "decode", "augment", "transform"}


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return face_cache.ensure(tmp_path_factory.mktemp("faces") / "one", people=1)


def config(faces: Path, **changes: Any) -> LoadingTimelineConfig:
    small: dict[str, Any] = {"batches": BATCHES, "batch_size": BATCH_SIZE, "step_ms": 1.0, "slow_batch_ms": 1000.0}
    return LoadingTimelineConfig(**{"path_to_folder": str(faces), "augmentation": "affine", **small, **changes})


@pytest.fixture(scope="module")
def stock(faces: Path) -> list[LoaderTrace]:
    """In order, and not."""
    return measure(config(faces, start_method="fork"))


@pytest.fixture(scope="module")
def runs(faces: Path, stock: list[LoaderTrace]) -> list[LoaderTrace]:
    """One of each kind."""
    fast = measure(config(faces, loader="fast", augmentation="none"))
    alone = measure(config(faces, workers=0, slow_batch_ms=0.0))
    return [*stock, *fast, *alone]


def by_batch(run: LoaderTrace) -> dict[int, list[Span]]:
    """What was done to each batch before the main process had it."""
    found = defaultdict(list)
    for span in run.spans:
        if span.batch is not None and span.name not in ("wait", "consume"):
            found[span.batch].append(span)
    return found


def test_every_batch_is_loaded_and_consumed_once(runs: list[LoaderTrace]) -> None:
    for run in runs:
        counts = Counter((span.name, span.batch) for span in run.spans if span.lane == run.main)
        assert all(counts[name, batch] == 1 for name in ("wait", "consume") for batch in range(BATCHES))
        for spans in by_batch(run).values():
            assert Counter(span.name for span in spans)["decode"] == BATCH_SIZE
        for batch in run.batches:
            assert 0 <= batch.began < batch.finished <= batch.taken


def test_spans_of_a_thread_nest(runs: list[LoaderTrace]) -> None:
    for run in runs:
        for lane in run.lanes:
            spans = [span for span in run.spans if span.lane == lane]
            assert spans == sorted(spans, key=lambda span: span.start)
            around: list[Span] = []
            for span in spans:
                assert span.start <= span.end
                while around and around[-1].end <= span.start:
                    around.pop()
                assert not around or span.end <= around[-1].end
                if span.name in STAGES:
                    assert "fetch" in [outer.name for outer in around]
                around.append(span)


def test_a_batch_is_the_work_of_one_worker(stock: list[LoaderTrace]) -> None:
    for run in stock:
        assert len(run.lanes) == 3
        assert list(run.lanes.values()) == ["main process", "loader worker 0", "loader worker 1"]
        workers = {number: {span.lane for span in spans} for number, spans in by_batch(run).items()}
        assert sorted(workers) == list(range(BATCHES))
        assert all(len(lanes) == 1 and run.main not in lanes for lanes in workers.values())
        for spans in by_batch(run).values():
            assert {span.name for span in spans} >= STAGES | {"fetch", "collate"}


def test_a_late_batch_holds_up_the_others_only_in_order(stock: list[LoaderTrace]) -> None:
    in_order, out_of_order = stock
    assert [batch.number for batch in in_order.batches] == list(range(BATCHES))
    numbers = [batch.number for batch in out_of_order.batches]
    assert sorted(numbers) == list(range(BATCHES))
    assert numbers.index(LATE) > numbers.index(LATE + 1)
    late = next(batch for batch in in_order.batches if batch.number == LATE)
    behind = [batch for batch in in_order.batches if batch.finished < late.taken < batch.taken]
    assert behind
    assert all(in_order.held_up()[batch.number] > 0 for batch in behind)


def test_only_the_late_file_is_late(runs: list[LoaderTrace]) -> None:
    for run in runs:
        late = [span.batch for span in run.spans if span.name == "late"]
        assert late == ([] if run.late is None else [LATE])


def test_without_workers_the_main_process_does_it_all(runs: list[LoaderTrace]) -> None:
    alone = runs[-1]
    assert list(alone.lanes.values()) == ["main process"]
    assert all(held_up == 0 for held_up in alone.held_up().values())


def test_threads_have_lanes_in_one_process(runs: list[LoaderTrace]) -> None:
    fast = runs[2]
    assert {pid for pid, _ in fast.lanes} == {os.getpid()}
    assert all(name.startswith("fast-loader-") for name in list(fast.lanes.values())[1:])


def test_the_queue_ends_empty_and_is_never_negative(runs: list[LoaderTrace]) -> None:
    for run in runs:
        counts = [count for _, count in run.queue()]
        assert min(counts) == 0 == counts[-1]
        assert all(abs(after - before) == 1 for before, after in itertools.pairwise(counts))


def test_a_trace_is_valid_by_the_trace_event_format(runs: list[LoaderTrace]) -> None:
    for run in runs:
        events = json.loads(json.dumps(trace_events(run)))
        assert {event["ph"] for event in events} == {"M", "X", "C", "s", "f"}
        for event in events:
            assert isinstance(event["name"], str)
            assert isinstance(event["pid"], int)
            assert isinstance(event["tid"], int)
            assert event["ph"] == "M" or event["ts"] >= 0
            assert event["ph"] != "X" or event["dur"] >= 0
            assert event["ph"] != "C" or event["args"]["batches"] >= 0
        named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
        assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} == named == set(run.lanes)
        counts = [event["ts"] for event in events if event["ph"] == "C"]
        assert counts == sorted(counts)
        check_flows(events)


def check_flows(events: list[dict[str, Any]]) -> None:
    """Each flow has two ends, in this order, and each end lies in a slice of its batch."""
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(ends) == set(range(BATCHES))
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"]
        assert ends[number]["bp"] == "e"
        for flow in (start, ends[number]):
            assert any(
                event["ph"] == "X"
                and (event["pid"], event["tid"]) == (flow["pid"], flow["tid"])
                and event["args"].get("batch") == number
                and event["ts"] <= flow["ts"] <= event["ts"] + event["dur"]
                for event in events
            )


def test_each_kind_of_run_can_be_drawn(runs: list[LoaderTrace], tmp_path: Path) -> None:
    for number, group in enumerate([runs[:2], runs[2:3], runs[3:]]):
        path = tmp_path / f"{number}.png"
        plot_timeline(path, group, "a title", "a reason")
        assert path.read_bytes().startswith(b"\x89PNG")


def work(tracer: Tracer, number: int) -> None:
    with tracer.batch(number), tracer.span("outer"), tracer.span("inner"):
        pass


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_spans_of_processes_and_threads_are_merged_on_one_clock(method: str, tmp_path: Path) -> None:
    tracer = Tracer(tmp_path)
    context: Any = multiprocessing.get_context(method)
    before = time.perf_counter()
    with tracer.span("around"):  # not yet written when the process is forked: the child must not write it too
        process = context.Process(target=work, args=(tracer, 7))
        process.start()
        thread = threading.Thread(target=work, args=(tracer, 8))
        thread.start()
        process.join()
        thread.join()
    spans = tracer.collect()
    assert [span.name for span in spans if span.batch is None] == ["around"]
    assert [span.name for span in spans if span.batch == 7] == ["outer", "inner"]
    assert {span.lane[0] for span in spans if span.batch == 7} == {process.pid}
    assert {span.lane[0] for span in spans if span.batch == 8} == {os.getpid()}
    assert len({span.lane for span in spans}) == 3
    assert all(before <= span.start <= span.end <= time.perf_counter() for span in spans)


def test_the_records_of_a_killed_worker_are_read(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path)
    work(tracer, 0)
    work(tracer, 1)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert {span.batch for span in tracer.collect()} == {0}


def test_the_command_writes_its_results_and_nothing_else(faces: Path, tmp_path: Path) -> None:
    scratch = Path(tempfile.mkdtemp())  # short: sockets are made in it
    folders = (f"--path-to-folder={faces}", f"--output={tmp_path / 'out'}")
    sizes = ("--batches=4", "--batch-size=4", "--workers=3", "--step-ms=1", "--slow-batch-ms=50")
    result = run_command("dataloading.timeline", *folders, *sizes, env={"TMPDIR": str(scratch)})
    assert (result.returncode, result.stderr) == (0, "")
    assert "first batch after" in result.stdout
    names = {"timeline.png", "summary.json", "trace-in-order.json", "trace-out-of-order.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["machine"]["torch"]
    assert summary["runs"]["in-order"]["order"] == [0, 1, 2, 3]
    assert json.loads((tmp_path / "out/trace-in-order.json").read_text())["traceEvents"]
    scratch.rmdir()  # nothing is left in it


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_leaves_no_process_and_no_file(number: signal.Signals, faces: Path, tmp_path: Path) -> None:
    arguments = ("dataloading.timeline", f"--path-to-folder={faces}", f"--output={tmp_path / 'out'}")
    scratch = Path(tempfile.mkdtemp())  # short: sockets are made in it
    with start_command(*arguments, "--slow-batch-ms", "3000", env={"TMPDIR": str(scratch)}) as process:
        deadline = time.monotonic() + 60
        while len(list(scratch.glob("*/*"))) < 2:  # both workers have begun
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (130, "stopped by SIGINT\n")
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
    scratch.rmdir()  # nothing is left in it


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--path-to-folder", "/no/such/folder"], "/no/such/folder is not there"),
        (["--output", "/dev/null/out"], "--output /dev/null/out cannot be written"),
        (["--batches", "2"], "--slow-batch 2 is not one of --batches 2"),
    ],
)
def test_bad_input_is_one_line(user_error: UserError, arguments: list[str], words: str, tmp_path: Path) -> None:
    previous = signal.getsignal(signal.SIGTERM)
    try:
        assert words in user_error(timeline.main, f"--output={tmp_path}", *arguments)
    finally:
        signal.signal(signal.SIGTERM, previous)  # the command sets its own
