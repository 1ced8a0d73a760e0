"""Functions that a user names on the command line as ``module:function``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import traceback
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from common.errors import UsageError


def import_function(
    flag: str,
    value: str,
    signature: str,
    arguments: tuple[Any, ...] = (),
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., Any]:
    """The function (or class) that ``module:function`` names. Python's usual search path applies; the current directory
    comes first with ``python -m`` and with ``torchrun -m``.

    :param flag: for the error's text, ``"--model"``
    :param signature: what is expected, ``"build(shape, classes) -> nn.Module"``
    :param arguments: those it will be called with; only their number is checked here
    :param keywords: keyword arguments, of which only the names are checked
    :raises UsageError: when the module cannot be imported, has no such attribute, or this cannot be called so
    """
    expected = f"give a function {signature} as module:function"
    module_name, _, name = value.partition(":")
    try:
        module = importlib.import_module(module_name)
    except UsageError:
        raise
    except Exception as error:  # a module's code may raise anything while it is imported
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if "importlib" in place.filename else f", {place.filename} line {place.lineno}"
        raise UsageError(
            f"{flag} {value}: module {module_name!r} cannot be imported "
            f"({type(error).__name__}: {' '.join(str(error).split())}{where}): {expected}"
        ) from error
    try:
        function = functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        raise UsageError(f"{flag} {value}: module {module_name!r} has no {name!r}: {expected}") from None
    if not callable(function):
        raise UsageError(f"{flag} {value} is a {type(function).__name__} and cannot be called: {expected}")
    try:
        # ValueError: a function written in C may not tell its parameters. Then the call checks them.
        with contextlib.suppress(ValueError):
            inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        raise UsageError(f"{flag} {value} takes other arguments ({error}): {expected}") from None
    return typing.cast(Callable[..., Any], function)
