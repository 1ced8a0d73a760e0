"""Commands that refuse their arguments. (In a file of its own: ranks import tests.launch, and need no pytest.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launch import error_lines


def mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, main: Callable[[], None], *arguments: str
) -> str:
    """The one line with which a command's ``main``, called in this process, refuses its arguments."""
    monkeypatch.setattr("sys.argv", [main.__module__, *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capsys.readouterr()
    assert exit_.value.code == 2
    assert out == ""
    assert len(error_lines(err)) == 1
    assert "Traceback" not in err
    return error_lines(err)[0]
