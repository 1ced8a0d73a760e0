"""``common.command_line.functions``: what ``module:function`` finds, and what is said when it finds nothing."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from common.command_line.functions import import_function
from common.errors import UsageError


def test_a_function_is_found_by_its_module_and_name() -> None:
    assert import_function("--model", "os.path:join", "join(a, b)", ("a", "b"))("a", "b") == "a/b"
    assert import_function("--model", "fractions:Fraction.from_float", "f(x)", (1.0,))(0.5) == 0.5


def test_a_function_that_does_not_tell_its_parameters_is_accepted() -> None:
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(max)
    assert import_function("--model", "builtins:max", "max(a, b)", (1, 2))(1, 2) == 2


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("no_such_module:f", "module 'no_such_module' cannot be imported (ModuleNotFoundError: No module named"),
        (".relative:f", "module '.relative' cannot be imported (TypeError"),
        (
            "broken:f",
            "module 'broken' cannot be imported (ZeroDivisionError: division by zero, {folder}/broken.py line 2)",
        ),
        ("wrong:f", "module 'wrong' cannot be imported (SyntaxError: "),
        ("right:g", "module 'right' has no 'g'"),
        ("right:x", "right:x is a int and cannot be called"),
        ("right:f", "right:f takes other arguments (too many positional arguments)"),
    ],
)
def test_what_is_no_such_function_is_one_line(
    value: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("broken", "x = 0\n1 / x"), ("wrong", "def f(:"), ("right", "x = 3\ndef f(a): ...")):
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(UsageError) as error:
        import_function("--model", value, "build(shape, classes)", (1, 2))
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"--model {value}")
    assert problem.format(folder=tmp_path) in message
    assert message.endswith(": give a function build(shape, classes) as module:function")
