"""``common.reporting.spans`` and the traces made of them: one recorder for threads, processes and all that is drawn."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.reporting.spans import COUNTERS, Interval, Recorder, Span, length, overlap, stacked, trace_events, union

MOMENTS = st.integers(0, 40)
INTERVALS = st.lists(st.tuples(MOMENTS, MOMENTS).map(lambda ends: (float(min(ends)), float(max(ends)))), max_size=8)


def work(recorder: Recorder, number: int) -> None:
    with recorder.within(batch=number), recorder.span("outer"), recorder.span("inner"):
        pass


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_spans_of_processes_and_threads_are_merged_on_one_clock(method: str, tmp_path: Path) -> None:
    recorder = Recorder(folder=tmp_path)
    context: Any = multiprocessing.get_context(method)
    before = time.perf_counter()
    recorder.add("early", before, before)  # the child must not write it too
    process = context.Process(target=work, args=(recorder, 7))
    thread = threading.Thread(target=work, args=(recorder, 8), name="a thread")
    process.start()
    thread.start()
    process.join()
    thread.join()
    spans = recorder.collect()
    assert [span.name for span in spans if not span.facts] == ["early"]
    for number in (7, 8):
        assert [span.name for span in spans if span.facts == {"batch": number}] == ["outer", "inner"]
    assert {span.lane for span in spans if span.facts == {"batch": 8}} == {"a thread"}
    assert all(before <= span.start <= span.end <= time.perf_counter() for span in spans)


def test_the_spans_of_a_killed_process_are_read(tmp_path: Path) -> None:
    recorder = Recorder(folder=tmp_path)
    if os.fork() == 0:
        work(recorder, 0)
        work(recorder, 1)
        os._exit(0)
    os.wait()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert [span.facts for span in recorder.collect()] == [{"batch": 0}] * 2


def test_laps_leave_no_gap() -> None:
    recorder = Recorder()
    with recorder.span("phase", "lane"):
        for name in "abc":
            recorder.lap(name, "lane")
    phase, *laps = recorder.read(recorder.take())
    assert [span.name for span in (phase, *laps)] == ["phase", "a", "b", "c"]
    assert phase.start == laps[0].start
    assert all(before.end == after.start for before, after in itertools.pairwise(laps))
    assert not recorder.take()


def cells(intervals: list[Interval]) -> set[int]:
    """The unit intervals that the intervals cover."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_moments(some: list[Interval], others: list[Interval]) -> None:
    assert length(union(some)) == len(cells(some))
    assert all(a[1] < b[0] for a, b in itertools.pairwise(union(some)))
    assert overlap(union(some), union(others)) == len(cells(some) & cells(others))


@given(INTERVALS)
def test_intervals_of_a_row_follow_each_other(intervals: list[Interval]) -> None:
    intervals.sort()
    rows = stacked(intervals)
    assert set(rows) == set(range(max(rows, default=-1) + 1))
    for row in set(rows):
        mine = [interval for interval, other in zip(intervals, rows, strict=True) if other == row]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))


@given(INTERVALS)
def test_slices_of_a_trace_nest(intervals: list[Interval]) -> None:
    """Whatever was recorded: the format forbids others."""
    intervals.sort(key=lambda interval: (interval[0], -interval[1]))
    spans = [Span("a", *interval, "lane", {"bytes": 1}) for interval in intervals]
    events = trace_events({"rank 0": spans, "rank 1": [Span("memory", 1, 1, COUNTERS, {"state": 5})]})
    (counter,) = [event for event in events if event["ph"] == "C"]
    assert (counter["pid"], counter["ts"], counter["args"]) == (1, 1e6, {"state": 5})
    slices = [event for event in events if event["ph"] == "X"]
    assert [(event["ts"], event["dur"]) for event in slices] == [(1e6 * s, 1e6 * (e - s)) for s, e in intervals]
    named = {event["tid"] for event in events if event["name"] == "thread_name" and event["pid"] == 0}
    assert {event["tid"] for event in slices} == named
    for tid in named:
        ends: list[float] = []
        for event in (event for event in slices if event["tid"] == tid):
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            ends.append(event["ts"] + event["dur"])
            assert ends == sorted(ends, reverse=True)
