"""Commands that refuse their arguments, called in the tests' own process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launch import error_lines

UserError = Callable[..., str]


@pytest.fixture
def user_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> UserError:
    """``user_error(main, *arguments)``: the one line with which a command's ``main`` refuses them."""

    def run_here(main: Callable[[], None], *arguments: str | Path) -> str:
        monkeypatch.setattr("sys.argv", [main.__module__, *map(str, arguments)])
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as end:
                main()
        finally:
            signal.signal(signal.SIGTERM, before)  # a command may set its own, for the rest of its process
        out, err = capsys.readouterr()
        assert end.value.code == 2
        assert out == ""
        assert "Traceback" not in err
        (line,) = error_lines(err)  # beside what was logged until then
        return line

    return run_here
