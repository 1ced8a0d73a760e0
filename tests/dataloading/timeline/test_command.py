"""``dataloading.timeline``: its traces of ``DataLoader``, the picture, and the command."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.reporting.spans import Span, in_lane
from dataloading.synthetic import face_cache
from dataloading.timeline import __main__ as timeline
from dataloading.timeline.__main__ import SLOW_BATCH, LoadingTimelineConfig, measure
from dataloading.timeline.tracing import MAIN, LoaderTrace
from tests.support.launch import run_command, start_command
from tests.support.user_errors import UserError

BATCHES, BATCH_SIZE = 6, 4
STAGES = {"read", "decode", "augment", "transform"}


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return face_cache.ensure(tmp_path_factory.mktemp("faces") / "one", people=1)


def config(faces: Path, **changes: Any) -> LoadingTimelineConfig:
    small: dict[str, Any] = {"batches": BATCHES, "batch_size": BATCH_SIZE, "step_ms": 1.0, "slow_batch_ms": 1000.0}
    return LoadingTimelineConfig(**{"path_to_folder": str(faces), "augmentation": "affine", **small, **changes})


def temporary(folder: Path, of_torch: Path) -> dict[str, str]:
    """An environment with this folder for temporary files, and another for those that torch writes when it is imported."""
    return {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(of_torch)}


@pytest.fixture(scope="module")
def runs(faces: Path) -> list[LoaderTrace]:
    """In order, and not."""
    return measure(config(faces, start_method="fork"))


def test_every_batch_is_loaded_and_consumed_once(runs: list[LoaderTrace]) -> None:
    for run in runs:
        counts = Counter((span.name, span.facts.get("batch")) for span in run.spans)
        assert all(counts[name, batch] == 1 for name in ("wait", "consume") for batch in range(BATCHES))
        assert all(counts["decode", batch] == BATCH_SIZE for batch in range(BATCHES))
        for batch in run.batches:
            assert 0 <= batch.began < batch.finished <= batch.taken


def test_spans_of_a_thread_nest(runs: list[LoaderTrace]) -> None:
    for run in runs:
        for lane in run.lanes:
            around: list[Span] = []
            for span in in_lane(run.spans, lane):
                while around and around[-1].end <= span.start:
                    around.pop()
                assert not around or span.end <= around[-1].end
                if span.name in STAGES:
                    assert "fetch" in [outer.name for outer in around]
                around.append(span)


def test_a_batch_is_the_work_of_one_worker(runs: list[LoaderTrace]) -> None:
    """A batch is the work of one worker.

    Claim (dataloading/README.md, 2): a worker makes whole batches; a late file holds up the others only in order.
    """
    for run in runs:
        assert run.lanes == [MAIN, "loader worker 0", "loader worker 1"]
        for number in range(BATCHES):
            spans = [s for s in run.spans if s.facts.get("batch") == number and s.name not in ("wait", "consume")]
            assert len({span.lane for span in spans} - {MAIN}) == 1
            assert {span.name for span in spans} >= STAGES | {"fetch", "collate"}


def test_a_late_batch_holds_up_the_others_only_in_order(runs: list[LoaderTrace]) -> None:
    """A late batch holds up the others only if they must come in order.

    Claim (dataloading/README.md, 2): a worker makes whole batches; a late file holds up the others only in order.
    """
    in_order, out_of_order = runs
    assert [batch.number for batch in in_order.batches] == list(range(BATCHES))
    numbers = [batch.number for batch in out_of_order.batches]
    assert sorted(numbers) == list(range(BATCHES))
    assert numbers.index(SLOW_BATCH) > numbers.index(SLOW_BATCH + 1)
    late = next(batch for batch in in_order.batches if batch.number == SLOW_BATCH)
    assert [batch for batch in in_order.batches if batch.finished < late.taken < batch.taken]


def test_only_the_late_file_is_late(runs: list[LoaderTrace]) -> None:
    for run in runs:
        assert [span.facts["batch"] for span in run.named("late")] == [SLOW_BATCH]


@pytest.mark.examples
def test_the_command_writes_its_results_and_nothing_else(faces: Path, tmp_path: Path) -> None:
    scratch = Path(tempfile.mkdtemp())  # short: sockets are made in it
    folders = (f"--path-to-folder={faces}", f"--output={tmp_path / 'out'}")
    sizes = ("--batches=4", "--batch-size=4", "--step-ms=1", "--slow-batch-ms=50", "--start-method=spawn")
    result = run_command("dataloading.timeline", *folders, *sizes, env=temporary(scratch, tmp_path))
    assert result.returncode == 0, result.stderr  # which may say that the machine is busy
    assert "first batch after" in result.stdout
    assert "taken in the order 0 1 2 3\n" in result.stdout
    names = {"timeline.png", "trace-in-order.json", "trace-out-of-order.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert (tmp_path / "out/timeline.png").is_file()
    events = json.loads((tmp_path / "out/trace-in-order.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert lanes[:3] == [MAIN, "loader worker 0", "loader worker 1"]
    scratch.rmdir()  # nothing is left in it


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_leaves_no_process_and_no_file(number: signal.Signals, faces: Path, tmp_path: Path) -> None:
    arguments = ("dataloading.timeline", f"--path-to-folder={faces}", f"--output={tmp_path / 'out'}")
    scratch = Path(tempfile.mkdtemp())  # short: sockets are made in it
    with start_command(*arguments, "--slow-batch-ms", "3000", env=temporary(scratch, tmp_path)) as process:
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
        (["--batches", "2"], "--batches 2 is out of range: it must be at least 3"),
        (["--workers", "0"], "--workers 0 is out of range"),
    ],
)
def test_bad_input_is_one_line(user_error: UserError, arguments: list[str], words: str, tmp_path: Path) -> None:
    assert words in user_error(timeline.main, f"--output={tmp_path}", *arguments)
