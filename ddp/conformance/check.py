"""A check: a function that every rank of a group runs, with a wrapper that may be right or wrong.

    @check
    def gradients_are_the_average_of_the_ranks(wrap: Wrap) -> None:
        \"\"\"After backward, every .grad is the average of what the ranks computed.\"\"\"
        network = two_layers()
        model = wrap(network)
        loss_of(model(inputs())).backward()
        expect_same(gradients(network), average(alone(network)))

It returns if the wrapper is right. If a value is wrong, it raises :class:`Wrong` with the numbers. Any other error is the
wrapper's own: it refuses to do what was asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, overload

from torch import nn


class Wrap(Protocol):
    """The class under test: ``wrap(module, **options)`` is the wrapped module, with the options of torch's DDP."""

    def __call__(self, module: nn.Module, **options: Any) -> Any: ...


class Wrong(AssertionError):
    """The wrapper did something else than a DDP does. The message has the numbers."""


@dataclass(frozen=True)
class Check:
    """One check.

    :param name: what it proves, as a sentence
    :param topic: the module it stands in
    :param run: what every rank calls
    :param at_least: the smallest number of ranks that it can run with
    """

    name: str
    topic: str
    run: Callable[[Wrap], None]
    at_least: int = 2

    @property
    def proves(self) -> str:
        """Its docstring: why the name matters."""
        return inspect.getdoc(self.run) or ""


@overload
def check(run: Callable[[Wrap], None]) -> Callable[[Wrap], None]: ...


@overload
def check(*, at_least: int) -> Callable[[Callable[[Wrap], None]], Callable[[Wrap], None]]: ...


def check(run: Callable[[Wrap], None] | None = None, *, at_least: int = 2) -> Any:
    """Make a function a check; its name becomes the check's."""

    def made(function: Callable[[Wrap], None]) -> Callable[[Wrap], None]:
        name, topic = function.__name__.replace("_", " "), function.__module__.rpartition(".")[2]
        CHECKS.append(Check(name, topic, function, at_least))
        return function

    return made if run is None else made(run)


# All checks, in the order in which their modules are imported by ddp.conformance.checks.
CHECKS: list[Check] = []
