"""The reducer of the drop-in: it leaves out buckets that no rank uses, and says when a backward pass is over."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from ddp.by_hand import errors
from ddp.by_hand.reducer import Reducer


class DropInReducer(Reducer):
    """A reducer to which other parts of a wrapper can be attached.

    ``before_backward`` are called when a backward pass that synchronizes begins, ``after_backward`` when it has ended, ``after_none``
    when one has ended that gave no parameter a gradient.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.before_backward: list[Callable[[], None]] = []
        self.after_backward: list[Callable[[], None]] = []
        self.after_none: list[Callable[[], None]] = []
        self.skip_unused = False  # whether buckets without any gradient are not sent
        self._skipped: set[int] = set()  # parameters of such buckets in this pass
        self._accumulated: set[int] = set()  # parameters that got gradients in passes that did not synchronize
        self.others_ready = False  # whether a gradient that is in no bucket became ready in this pass

    @property
    def rebuilt(self) -> bool:
        """Whether the buckets have got their final order."""
        return self._order is None

    def unused(self) -> dict[str, nn.Parameter]:
        """The parameters, by name, that got no gradient in the latest backward pass. (The module may have others in their place.)"""
        named = zip(self.names, self.parameters, self._remaining, strict=False)
        return {name: parameter for name, parameter, remaining in named if remaining > 0}

    def begin(self, *outputs: Node | None) -> None:
        self._leave_interrupted()
        if not self._running:
            self.others_ready = False
            self._skipped.clear()
            for call in self.before_backward:
                call()
        super().begin(*outputs)

    def ready(self, index: int, *arguments: object) -> None:
        if not self.expecting:
            self._accumulated.add(index)
        super().ready(index, *arguments)

    def _send(self) -> None:
        bucket = self.buckets[len(self.sent)]
        if self.skip_unused and not any(map(self._has_gradient, bucket.parameters)):
            self._skipped.update(bucket.parameters)
            self.sent.append(_Skipped())
        else:
            super()._send()

    def _has_gradient(self, index: int) -> bool:
        return self._remaining[index] <= 0 or index in self._accumulated

    def agree_on_receivers(self, used: list[bool]) -> set[int]:
        return super().agree_on_receivers(used) - self._skipped

    def _finish(self) -> None:
        super()._finish()
        # The lesson's reducer still expects a pass if none of its gradients became ready.
        if not self.expecting or self.others_ready:
            self.expecting = False
            self._accumulated.clear()
            for call in self.after_backward:
                call()
        else:
            for call in self.after_none:
                call()


class _Skipped:
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

        :raises RuntimeError: if parameters were converted after wrapping
        """
        if error := errors.converted(self.names, self.parameters, self._nodes):
            raise error
        self.average()

    @abc.abstractmethod
    def average(self) -> None:
        """Make the averages the gradients."""
