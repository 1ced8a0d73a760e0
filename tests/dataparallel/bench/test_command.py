"""``python -m dataparallel.bench``, as a user types it."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from dataparallel.bench import __main__ as bench
from tests.support.launch import run_forked, start_command
from tests.support.user_errors import UserError


@pytest.mark.examples
def test_it_measures_draws_and_explains(tmp_path: Path) -> None:
    """The bench measures, draws its figure and explains which step costs most.

    Claim (dataparallel/README.md): the bench measures, draws and explains; the steps add up.
    """
    (done,) = run_forked(
        "dataparallel.bench",
        "--batch-sizes",
        "16,4",  # in any order
        "--rounds",
        "2",
        "--devices",
        "cpu,cpu",
        "--output",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "inference, ms per call by batch size",
        "training, ms per call by batch size",
        *(() if "other programs left" in done.stderr else ("handwritten: ",)),
    ):
        assert words in done.stdout
    for name in ("throughput.png", "steps.png"):
        assert (tmp_path / name).is_file()
    written = json.loads((tmp_path / "dataparallel.json").read_text())
    assert written["devices"] == ["cpu", "cpu"]
    assert [(point["mode"], point["batch_size"]) for point in written["points"]] == [
        ("inference", 4), ("inference", 16), ("training", 4), ("training", 16)
    ]  # fmt: skip
    assert all(len(seconds) == 2 for point in written["points"] for seconds in point["seconds"].values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch-sizes", "1", "--devices", "cpu,cpu"), "has no sample for each of 2 devices"),
        (
            ("--batch-sizes", "2", "--devices", "cpu,cpu", "--model", "resnet18"),
            "is trained with several samples per device",
        ),
        (("--devices", "cpu"), "--devices cpu is a single device"),
    ],
)
def test_a_mistake_is_one_line(user_error: UserError, arguments: tuple[str, ...], words: str) -> None:
    assert words in user_error(bench.main, *arguments)


@pytest.mark.faults
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    with start_command("dataparallel.bench", "--rounds", "1000", "--output", str(tmp_path)) as process:
        children: list[psutil.Process] = []
        while len(children) < 4:  # two ranks, their fork server, and the tracker of shared resources
            assert process.poll() is None
            children = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in stderr
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
