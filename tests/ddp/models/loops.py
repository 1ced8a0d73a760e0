"""Training programs of random models, with our wrappers and with all ranks' replicas in one process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp.by_hand import HandwrittenDistributedDataParallel, NaiveDistributedDataParallel
from tests.ddp.by_hand.programs import Program, clamp
from tests.ddp.by_hand.wrappers import OPTIMIZERS, Case, Results, first_difference, kept
from tests.ddp.models.reference import Replicas
from tests.ddp.sharded.trained import Sharding, WholeRun
from tests.support.zoo.named import loss_of
from tests.support.zoo.random_models import Model, models, tolerance

WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "naive": lambda network, **_: NaiveDistributedDataParallel(network),
    "handwritten": HandwrittenDistributedDataParallel,
    **{f"zero{stage}": Sharding(stage) for stage in (1, 2, 3)},
}
# With a number that is odd: in inference mode, an evaluation would make inference tensors of buffers that are assigned.
GOING_ON = ("step", "accumulate", "clip", "skip", "keep_gradients", "halve", "evaluate", "swap", "write")
CHANGES = [("freeze", 1), ("convert", 0), ("convert", 1), ("load", 0), ("load", 1)]  # some of which are refused


@dataclass(frozen=True)
class Loop:
    """A loop of the user's own, with a wrapper of :data:`WRAPPERS`."""

    program: Program
    wrapper: str


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    wrapper = draw(st.sampled_from(sorted(WRAPPERS)))
    going_on = st.tuples(st.sampled_from(GOING_ON), st.sampled_from([1, 3, 5, 9]))
    actions = draw(st.lists(going_on | going_on | going_on | st.sampled_from(CHANGES), min_size=3, max_size=8))
    # Hooks of a sharded wrapper see averages.
    after = ("clamp in place",) if wrapper.startswith("zero") and draw(st.booleans()) else ()
    case = Case(draw(models()), broadcast_buffers=False, optimizer=draw(st.sampled_from(["momentum", "sgd"])))
    return Loop(Program(case, (("step", 1), *actions, ("step", 1)), after=after), wrapper)


class Emulated(WholeRun):
    """All ranks' runs in this process, of which this rank's results are told. It has the face of a wrapper, too."""

    def __init__(self, program: Program) -> None:
        self._program, self._case, self._number, self._synchronizes = program, program.case, 0, True
        optimizer = OPTIMIZERS[program.case.optimizer]
        self._replicas = Replicas(lambda: program.case.network(0), dist.get_world_size(), optimizer)
        self.networks = self._replicas.networks
        self.module = self.network = self.networks[dist.get_rank()]
        self._model = self
        self._begin()

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for network in self.networks for parameter in network.parameters()]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._synchronizes = False
        yield
        self._synchronizes = True

    def _forward_of_all(self) -> list[Any]:
        self._number += 1
        inputs = [self._case.inputs(self._number, rank) for rank in range(len(self.networks))]
        return [network(x) for network, x in zip(self.networks, inputs, strict=True)]

    def _forward(self) -> Any:
        return self._forward_of_all()[dist.get_rank()]

    def _loss(self) -> Tensor:
        losses = [loss_of(outputs) for outputs in self._forward_of_all()]
        self._own_loss = losses[dist.get_rank()]
        return torch.stack(losses).sum()

    def _backward(self, loss: Tensor) -> Iterator[Results]:
        loss.backward()
        if self._synchronizes:
            self._replicas.average()
            for parameter in self._trained if self._program.after else ():
                clamp(parameter)
        yield {"loss": self._own_loss}

    def _step_another_model(self) -> None:
        """There is no wrapper."""

    def _clip(self, most: float) -> Tensor:
        return torch.tensor(self._replicas.clip(most)[dist.get_rank()])


def recorded(loop: Loop) -> Iterator[tuple[str, Results]]:
    """This rank's results, up to an error."""
    run = WholeRun(WRAPPERS[loop.wrapper], loop.program)
    try:
        yield from kept(run.run())
    finally:
        run.close()


def compare(loop: Loop, ours: list[tuple[str, Results]]) -> str | None:
    """Where the results of a loop, which may have come to an early end, first differ from the emulation's."""
    model = loop.program.case.model
    assert isinstance(model, Model)
    expected = itertools.islice(kept(Emulated(loop.program).run()), len(ours))
    return first_difference(ours, expected, tolerance(model))
