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
from typing import Any, Protocol

from torch import nn


class Wrap(Protocol):
    """The class under test: ``wrap(module, **options)`` is the wrapped module, with the options of torch's DDP."""

    def __call__(self, module: nn.Module, **options: Any) -> Any: ...


Run = Callable[[Wrap], None]


class Wrong(AssertionError):
    """The wrapper did something else than a DDP does. The message has the numbers."""


@dataclass(frozen=True)
class Check:
    """One check.

    :param name: what it proves, as a sentence
    :param topic: the module it stands in
    :param run: what every rank calls
    """

    name: str
    topic: str
    run: Run

    @property
    def proves(self) -> str:
        """Its docstring: why the name matters."""
        return inspect.getdoc(self.run) or ""


def check(run: Run) -> Run:
    """Make a function a check; its name becomes the check's."""
    CHECKS.append(Check(run.__name__.replace("_", " "), run.__module__.rpartition(".")[2], run))
    return run


# All checks, in the order in which their modules are imported by ddp.conformance.checks.
CHECKS: list[Check] = []
