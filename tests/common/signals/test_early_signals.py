"""common/signals/early_signals.py: a stop signal during the imports is one line and a status."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from common.signals import stop_request
from tests.support.launch import run_program, start_command


@pytest.mark.parametrize(
    ("module", "number", "status"),
    [
        ("ddp.train", signal.SIGTERM, 75),
        ("ddp.train", signal.SIGHUP, 75),
        ("ddp.train", signal.SIGINT, 130),
        ("ddp.evaluate", signal.SIGTERM, 128 + signal.SIGTERM),
        ("dataparallel.train", signal.SIGINT, 130),
        ("dataloading.bench", signal.SIGINT, 130),
    ],
)
def test_a_signal_during_the_imports_is_one_line(
    module: str, number: signal.Signals, status: int, tmp_path: Path
) -> None:
    """A signal during the imports is one line.

    Claim (ddp/resilience/README.md): a signal during the imports is one line.
    """
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    with start_command(module, env={"PYTHONPATH": str(tmp_path)}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert err == f"stopped by {number.name} before the command began\n"


def test_what_is_imported_by_another_program_hears_nothing() -> None:
    program = (
        "import signal, ddp, dataparallel, dataloading; "
        "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.getsignal(signal.SIGHUP) == signal.SIG_DFL)"
    )
    done = run_program(program)
    assert done.stdout == "True True\n", done.stderr


def test_a_hangup_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_request.handled_signals()
        with start_command("ddp.train", env={"PYTHONPATH": str(tmp_path)}) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGHUP)
            time.sleep(0.5)
            assert process.poll() is None
    finally:
        signal.signal(signal.SIGHUP, before)
