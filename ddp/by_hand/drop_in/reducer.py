"""The reducer of the drop-in: it leaves out buckets that no rank uses, and says when a backward pass is over."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.autograd.profiler import record_function

from ddp.by_hand import errors
from ddp.by_hand.reducer import Reducer

SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"  # torch's name of this event in profiles


class DropInReducer(Reducer):
    """A reducer to which other parts of a wrapper can be attached.

    ``before_backward`` are called when a backward pass that synchronizes begins, ``after_backward`` when it has ended.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.before_backward: list[Callable[[], None]] = []
        self.after_backward: list[Callable[[], None]] = []
        self.skip_unused = False  # whether buckets without any gradient are not sent
        self._skipped: set[int] = set()  # parameters of such buckets in this pass
        self._used: set[int] = set()  # parameters to which backward gave gradients, since the latest averages
        # Copies of gradients that were set by hand, by parameters. They stay where no rank has used the parameter.
        self._set_by_hand: dict[int, Tensor] = {}
        self._averaged: set[int] = set()  # parameters that some rank has used
        self.passes = 0  # backward passes that synchronized
        self.others_ready = False  # whether a gradient that is in no bucket became ready in this pass

    @property
    def rebuilt(self) -> bool:
        """Whether the buckets have got their final order."""
        return self._order is None

    def begin(self, *outputs: Node | None) -> None:
        self._leave_interrupted()
        if not self._running:
            self.others_ready = False
            self.passes += 1
            self._skipped.clear()
            self._set_by_hand.clear()
            for call in self.before_backward:
                call()
        searches = self._find_unused and not (self._running and self._depends)
        with record_function(SEARCH) if searches else contextlib.nullcontext():
            super().begin(*outputs)

    def ready(self, index: int, *arguments: object) -> None:
        self._used.add(index)
        super().ready(index, *arguments)

    def _send(self) -> None:
        bucket = self.buckets[len(self.sent)]
        unused = bucket.parameters.keys() - self._used
        for index in unused:
            if (gradient := self.parameters[index].grad) is not None:
                self._set_by_hand[index] = gradient.clone()
        if self.skip_unused and unused == bucket.parameters.keys():
            self._skipped.update(unused)
            self.sent.append(Skipped())
        else:
            super()._send()

    def agree_on_receivers(self, used: list[bool]) -> set[int]:
        used = [has_gradient and index in self._used for index, has_gradient in enumerate(used)]
        self._averaged = super().agree_on_receivers(used) - self._skipped
        return self._averaged

    def _finish(self) -> None:
        super()._finish()
        # The lesson's reducer still expects a pass if none of its gradients became ready.
        if not self.expecting or self.others_ready:
            self.expecting = None
            self._used.clear()
            for index in self._set_by_hand.keys() - self._averaged:
                self.parameters[index].grad = self._set_by_hand[index]
            for call in self.after_backward:
                call()


class Skipped:
    """In the place of an all-reduce that was left out."""

    def wait(self) -> None:
        pass


class UnbucketedAverage(abc.ABC):
    """Averages the gradients of parameters that are in no bucket.

    :param parameters: by name, in the same order on all ranks
    :param reducer: knows when a backward pass synchronizes
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, reducer: DropInReducer
    ) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.group, self.reducer = group, reducer
        self._nodes = [get_gradient_edge(parameter).node for parameter in self.parameters]
        self.hooks = [n.register_hook(functools.partial(self.ready, i)) for i, n in enumerate(self._nodes)]
        reducer.ids.update(map(id, self.parameters))
        reducer.after_backward.append(self._finish)

    def ready(self, index: int, *_: object) -> None:
        """The gradient of parameter ``index`` is in ``.grad``."""
        if self.reducer.expecting:
            self.reducer.begin()  # it ends this pass, also if none of its own gradients becomes ready
            self.reducer.others_ready = True

    @torch.no_grad()
    def _finish(self) -> None:
        """Backward is over.

        :raises RuntimeError: if parameters were converted or replaced after wrapping
        """
        if error := errors.changed(self.reducer.module, self.names, self._nodes):
            raise error
        self.average()

    @abc.abstractmethod
    def average(self) -> None:
        """Make the averages the gradients."""
