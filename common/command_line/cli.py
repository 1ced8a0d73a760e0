"""Commands: a frozen dataclass is the command line, and a user error is one line.

Each command declares its configuration once, as a frozen dataclass whose fields are made with :func:`option`; the flags,
their help, their defaults and the check of their range all come from there::

    @dataclass(frozen=True)
    class Config:
        epochs: int = option(10, "passes over the training set", minimum=1)

    @command
    def main() -> None:
        config = parse(Config, "ddp.train", __doc__)

Nothing heavy is imported here, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import math
import operator
import os
import re
import signal
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from common.command_line.error_line import print_error
from common.command_line.stdout import stdout_errors
from common.errors import UsageError
from common.launchers import adopt_launcher
from common.signals import early_signals
from common.signals.stop_request import INTERRUPTED, REQUEUE, STOPPED, finalize_silently, keep_stops

Config = TypeVar("Config")


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    or_function: bool = False,
    implied: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    per_node: bool = False,
) -> Any:
    """A field of a command's configuration; ``minimum`` and ``maximum`` are inclusive, ``above`` and ``below`` are not.

    A field of type ``tuple[int, ...]`` (or of another element type) is given as a list, ``--workers 0,2,4``. The choices
    and the range then apply to each value.

    :param or_function: accept ``module:function`` besides the choices; see common/command_line/functions.py
    :param implied: the value of a flag that is given without one
    :param per_node: whether the nodes of a job may have different values: for paths and interfaces
    """
    metadata = {
        "help": help,
        "choices": choices,
        "or_function": or_function,
        "implied": implied,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "below": below,
        "per_node": per_node,
    }
    return dataclasses.field(default=default, metadata=metadata)


def settings_of(config: Any) -> dict[str, str]:
    """The value of each flag that must be the same on all ranks, as text.

    :param config: a dataclass whose fields were made with :func:`option`
    """
    shared = [field.name for field in dataclasses.fields(config) if not field.metadata["per_node"]]
    return {flag_of(name): str(getattr(config, name)) for name in shared}


def flag_of(field_name: str) -> str:
    """``batch_size`` as it is typed: ``--batch-size``."""
    return "--" + field_name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """argparse, but a user error raises :class:`UsageError` (one line) instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        if message.startswith("unrecognized"):
            unknown = re.findall(r"(?<= )--?[\w-]+", message)
            near = [
                flag
                for name in unknown
                for flag in difflib.get_close_matches(name, self._option_string_actions, 1, 0.7)
            ]
            message += f": did you mean {', '.join(near)}?" if near else ""
        raise UsageError(f"{message} ({self.prog} --help lists what there is)")


def parse(
    config_type: type[Config],
    program: str,
    description: str | None,
    argv: Sequence[str] | None = None,
    *,
    underscores: bool = False,
) -> Config:
    """Read the command line into ``config_type``, a dataclass whose fields were made with :func:`option`.

    :param program: the module as it is run, ``"ddp.train"``
    :param argv: the arguments; ``sys.argv[1:]`` when None
    :param underscores: accept each flag also as ``-batch_size``, as the scripts of many courses do
    :raises UsageError: for an unknown flag, an unreadable value, a value out of its range, or a combination that
        ``config_type.__post_init__`` refuses
    """
    parser = _Parser(
        prog=f"python -m {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]
        kind, is_list = _value_type(hints[field.name])
        settings: dict[str, Any] = {"help": _help_of(field), "default": field.default, "dest": field.name}
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
        else:
            choices = field.metadata["choices"]
            settings |= {"type": kind, "choices": choices, "metavar": None if choices else kind.__name__.upper()}
            if field.metadata["or_function"]:
                settings |= {"type": _name_or_function(choices), "choices": None}
                settings["metavar"] = f"{{{','.join((*choices, 'MODULE:FUNCTION'))}}}"
            elif kind in (str, Path) and not choices:
                settings["type"] = _filled(kind)
            if is_list:
                settings |= {"type": _list_of(kind, choices), "choices": None}
                settings["metavar"] = f"{'|'.join(choices or [kind.__name__.upper()])},..."
            if field.metadata["implied"] is not None:
                settings |= {"nargs": "?", "const": field.metadata["implied"]}
        flags = [flag_of(field.name), *([f"-{field.name}"] if underscores else [])]
        parser.add_argument(*flags, **settings)
    values = vars(parser.parse_args(argv))
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]
        value = values[field.name]
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_range(field, number)
    return config_type(**values)


def split_arguments(arguments: Sequence[str], config_type: type) -> tuple[list[str], list[str]]:
    """A command's own arguments, and the script with its own: from ``--`` on, or from the first that is no flag or its value.

    :param config_type: the dataclass of the command's own arguments
    """
    with_value = {flag_of(field.name) for field in dataclasses.fields(config_type) if field.type != "bool"}
    own, script = list[str](), list(arguments)
    while script and script[0].startswith("-") and script[0] != "-m":
        flag = script.pop(0)
        if flag == "--":
            break
        own += [flag, *(script[:1] if flag in with_value else [])]
        del script[: flag in with_value]
    return own, script


def from_settings(config_type: type[Config], program: str, settings: Mapping[str, Any]) -> Config:
    """The configuration with these settings, which are in JSON's types, checked as a command line is; the inverse of
    ``dataclasses.asdict``.

    :raises UsageError: as :func:`parse`
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config_type)}  # type: ignore[arg-type]
    arguments = []
    for name, value in settings.items():
        if isinstance(value, bool):
            if value is not defaults.get(name):
                arguments.append(flag_of(name) if value else f"--no-{flag_of(name)[2:]}")
        elif value is not None:
            arguments.append(f"{flag_of(name)}={value}")
    return parse(config_type, program, None, arguments)


def _check_range(field: dataclasses.Field[Any], value: float) -> None:
    """:raises UsageError: naming the flag, the value and the range"""
    tests = {
        "minimum": ("at least", operator.ge),
        "maximum": ("at most", operator.le),
        "above": ("above", operator.gt),
        "below": ("below", operator.lt),
    }
    limits = {name: field.metadata[name] for name in tests if field.metadata[name] is not None}
    finite = isinstance(value, int) or math.isfinite(value)
    if not (finite and all(tests[name][1](value, limit) for name, limit in limits.items())):
        allowed = " and ".join(["finite"] * (not finite) + [f"{tests[name][0]} {limits[name]}" for name in limits])
        raise UsageError(f"{flag_of(field.name)} {value} is out of range: it must be {allowed}")


def command(main: Callable[[], None]) -> Callable[[], None]:
    """Make ``main`` a command: a :class:`UsageError` becomes one line on stderr and exit status 2, once per node of a job."""

    @functools.wraps(main)
    def run() -> None:
        try:
            early_signals.begin()
            adopt_launcher()
            with (
                keep_stops(lambda error: signal.SIGINT if isinstance(error, KeyboardInterrupt) else None),
                stdout_errors(),
            ):
                main()
            early_signals.leave_with(0)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one comes too late to say anything else
            finalize_silently()
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print("stopped by SIGINT", file=sys.stderr)
            sys.exit(INTERRUPTED)  # without a traceback
        except SystemExit as end:
            if end.code in (REQUEUE, *STOPPED):
                finalize_silently()
            raise
        except UsageError as error:
            early_signals.leave_with(2)
            print_error(error)
            sys.exit(2)

    return run


def is_function_name(value: str) -> bool:
    """Whether an option that takes ``module:function`` was given one, and not one of its choices."""
    return ":" in value


def _filled(kind: type) -> Callable[[str], Any]:
    """argparse's ``type`` for a text or path. An empty one comes from a shell variable that is not set, and must not be taken
    for the default or the current directory."""

    def read(text: str) -> Any:
        if not text.strip():
            raise argparse.ArgumentTypeError("the value is empty: give one, or leave the flag out")
        return kind(text)

    return read


def _name_or_function(choices: Sequence[str]) -> Callable[[str], str]:
    """argparse's ``type`` for one of the choices, or ``module:function``."""

    def read(text: str) -> str:
        if text in choices or all(text.partition(":")):
            return text
        raise argparse.ArgumentTypeError(
            f"invalid choice: {text!r} (choose from {', '.join(choices)} or module:function)"
        )

    return read


def _list_of(kind: Callable[[str], Any], choices: Sequence[str] | None) -> Callable[[str], tuple[Any, ...]]:
    """argparse's ``type`` for a list of values between commas."""

    def read(text: str) -> tuple[Any, ...]:
        values = []
        for part in text.strip().rstrip(",").split(","):
            try:
                values.append(kind(part.strip()))
            except ValueError as error:
                raise argparse.ArgumentTypeError(f"invalid {kind.__name__} value: {part!r}") from error
            if choices is not None and values[-1] not in choices:
                raise argparse.ArgumentTypeError(f"invalid choice: {part!r} (choose from {', '.join(choices)})")
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text} names a value twice")
        return tuple(values)

    return read


def _value_type(hint: Any) -> tuple[type, bool]:
    """``int`` for ``int``, ``int | None`` and ``tuple[int, ...]``, and whether it is the type of a list's values."""
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if is_list := typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return typing.cast(type, hint), is_list


def _help_of(field: dataclasses.Field[Any]) -> str:
    text, default = str(field.metadata["help"]), field.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    if default is not None and not isinstance(default, bool):
        text += f" (default: {default})"
    return text.replace("%", "%%")  # argparse formats help texts with %
