"""The events that the watch writes and the detectors read: the whole contract between them.

Each process writes one JSON object a line: the name of the class as ``kind``, and the fields. Parameters are known by their number, as
text: the order in which a process met them; an object (a data set, an optimizer) by a number of its own. A checksum tells whether two
tensors are equal. A probe stands for a gradient: two weighted sums of some elements, and their norm.

This file is loaded on both sides, so it imports nothing of the project.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import dataclass_transform

Probe = Sequence[float]
Probes = Mapping[str, Probe]  # by parameter
Checksums = Mapping[str, int]  # by parameter
_kinds: dict[str, Any] = {}  # by the class's name


@dataclass_transform(kw_only_default=True, frozen_default=True)
class _Typed:
    def __init_subclass__(cls) -> None:
        _kinds[cls.__name__] = dataclass(frozen=True, kw_only=True, eq=False)(cls)


class Event(_Typed):
    """Anything that happens.

    :ivar step: optimizer steps of the process until then
    :ivar where: ``file:line`` in the script; the watch fills it in, if it is not given
    """

    step: int = 0
    where: str = ""


def as_line(event: Event) -> bytes:
    """JSON; numpy's numbers and tensors become lists."""
    fields = {"kind": type(event).__name__, **vars(event)}
    return json.dumps(fields, default=lambda value: value.tolist()).encode() + b"\n"


def from_line(line: str) -> Event:
    fields: dict[str, Any] = json.loads(line)
    event: Event = _kinds[fields.pop("kind")](**fields)
    return event


# Processes.


class Process(Event):
    """A process begins, or is forked."""

    pid: int
    parent: int


class Group(Event):
    """A process group has been made."""

    rank: int


class WatchError(Event):
    """The watch itself has failed.

    :ivar text: the traceback
    """

    text: str


class NotWatched(Event):
    """This version of torch does not have what a watcher looks at.

    :ivar name: of a function, or why a file of the watch could not be loaded
    """

    name: str


class Compiled(Event):
    """torch.compile gets a model or a function, in which nothing is watched."""


class JoinBegins(Event):
    """DDP's ``join`` begins, under which ranks may take different steps."""


class Names(Event):
    """Parameters are met first, or named by a wrapper."""

    names: Mapping[str, str]


# Passes through the model.


class Around(Event):
    """A module that a wrapper holds is called with gradients, and not by the wrapper. Once for a line."""


class Flag(Event):
    """The script sets ``require_backward_grad_sync``."""


class Forward(Event):
    """A forward pass of DDP with gradients has ended.

    :ivar lost: whether parameters have no hooks of DDP, or no longer
    :ivar rows: a checksum of each sample; empty if the step is not looked at closely
    :ivar drawn_from: checksum of the generator from which the pass has drawn; None if it has not
    :ivar training: whether the model is in training mode
    :ivar layer: the class of the first layer that differs between training and evaluation, if any
    :ivar synchronizes: the flag ``require_backward_grad_sync``
    :ivar synchronizes_batchnorm: whether there is a SyncBatchNorm
    """

    lost: bool
    rows: Sequence[int]
    drawn_from: int | None
    training: bool
    layer: str | None
    synchronizes: bool
    synchronizes_batchnorm: bool


class Evaluation(Event):
    """A forward pass without gradients through a module that a wrapper holds. Once for a line.

    :ivar random: as ``Forward.layer``
    :ivar buffers: their checksums
    """

    training: bool
    random: str | None
    buffers: Sequence[int]


class Loss(Event):
    """A loss function's result enters the backward pass.

    :ivar call: ``file:line:instruction`` of each call of the script that leads to it
    :ivar samples: the first dimension of its target
    :ivar terms: over which it takes its mean or sum; 0 if all are masked
    :ivar weight: the factor of each term in the gradient
    :ivar is_mean: whether it takes the mean itself
    :ivar probes: of its input and its target
    :ivar share: its part of the tensor from which the backward pass began
    """

    call: str
    samples: int
    terms: int
    weight: float
    is_mean: bool
    probes: Sequence[Probe]
    share: float


class Local(Event):
    """Gradients depend on how a batch is divided, by design. Once for a reason.

    :ivar why: a clause
    """

    why: str


class Backward(Event):
    """A backward pass has ended. All but ``loss`` are empty, or None, if the step is not looked at closely.

    :ivar loss: from which it began
    :ivar before: ``.grad`` before it
    :ivar computed: the gradients that this rank computed by itself
    :ivar norm: of all gradients together, after it; None if there are none
    :ivar weights: checksum of one parameter's weights
    """

    before: Probes
    computed: Probes
    loss: float
    norm: float | None
    weights: Checksums


class ZeroGrad(Event):
    """Gradients are cleared."""


# Between the ranks.


class CollectiveBegins(Event):
    """Python code calls a collective of all ranks.

    :ivar what: the name of the function in torch.distributed, and the size of its tensor, if it takes one
    """

    what: str


class Collective(Event):
    """A collective that Python code has called.

    :ivar name: of the function in torch.distributed
    :ivar before: the values of its tensor, if those are few and on the CPU; else empty
    :ivar after: the same afterwards
    :ivar gaps: the strides of tensors with gaps in memory
    :ivar requires_grad: whether a tensor leads to parameters
    :ivar sends_parameter: whether a tensor is a parameter's, in a backward pass
    """

    name: str
    before: Sequence[float]
    after: Sequence[float]
    gaps: Sequence[Sequence[int]]
    requires_grad: bool
    sends_parameter: bool


class PutBack(Event):
    """An all_gather whose result holds a tensor that requires a gradient again."""


class WithoutGradient(Event):
    """An all_gather of a tensor that requires a gradient, whose result has none."""


# The optimizer.


class Weights(Event):
    """The weights of an optimizer's parameters.

    :ivar parameters: None if the step is not looked at closely
    """

    parameters: Checksums | None


class BeforeStep(Weights):
    """An optimizer's step begins; with a closure, when that has ended.

    :ivar own: its parameters
    :ivar scaler: whether the scaler has called it
    :ivar rates: the learning rate of each group
    :ivar without_gradient: its parameters whose ``.grad`` is None
    :ivar gradients: of all parameters; empty if the step is not looked at closely
    :ivar draws: another number than in the step before if torch's generator has been drawn from
    :ivar generators: checksums of NumPy's and Python's
    """

    own: Sequence[str]
    scaler: bool
    rates: list[float]
    without_gradient: Sequence[str]
    gradients: Probes
    draws: int
    generators: Sequence[int]


class Stepped(Weights):
    """An optimizer's step has ended.

    :ivar sharded: whether a parameter is a part of a larger one
    """

    sharded: bool


class Skipped(Event):
    """The scaler leaves a step with inf out."""


class Scale(Event):
    """The scaler multiplies a loss by this factor."""

    scale: float


class Unscale(Event):
    """The scaler divides the gradients.

    :ivar parameters: whose
    """

    parameters: Sequence[str]


class Autocast(Event):
    """Autocast begins.

    :ivar eps: of its dtype
    """

    eps: float


class Clip(Event):
    """Gradients are clipped.

    :ivar parameters: whose; empty if they came one by one, as from ``parameters()``
    :ivar norm: None where it is not known
    :ivar limit: None where each element is clipped
    """

    parameters: Sequence[str]
    norm: float | None
    limit: float | None


class Scheduled(Event):
    """A schedule of the learning rate.

    :ivar name: its class
    :ivar id: of itself
    :ivar optimizer: of its optimizer
    :ivar metric: by which it decides, if it does
    :ivar of_processes: whether it is Accelerate's, which takes a step for each process by design
    """

    name: str
    id: int
    optimizer: int
    metric: float | None
    of_processes: bool


class ScheduleMade(Scheduled):
    """A schedule is made."""


class Schedule(Scheduled):
    """A schedule takes a step."""


# Data.


class LoaderBegins(Event):
    """An iteration over a loader begins; the line is that which made the loader.

    :ivar iterator: its number in the process
    :ivar length: of the data set; 0 if it is not known
    :ivar batches: that the loader has; 0 if that is not known
    :ivar iterable: whether the data set is
    :ivar evaluates: False for ``update_bn``, which neither trains nor evaluates
    :ivar sampler: its class
    :ivar replicas: among which the sampler divides; None if it does not
    :ivar batch_size: None where the batches are not the loader's own
    :ivar workers: 0 for the process itself
    """

    iterator: int
    dataset: int
    length: int
    batches: int = 0
    iterable: bool
    evaluates: bool
    sampler: str
    replicas: int | None
    batch_size: int | None
    workers: int


class Batch(Event):
    """A batch has been taken.

    :ivar indices: the numbers of its samples; None if they are not known
    :ivar rows: a checksum of each sample
    :ivar targets: a checksum of each label: of what are whole numbers
    """

    iterator: int | None
    indices: Sequence[int] | None
    rows: Sequence[int]
    targets: Sequence[int]


class LoaderEnds(Event):
    """There is no further batch."""

    iterator: int | None


class Weighted(Event):
    """A WeightedRandomSampler."""

    sampler: int


class WeightedMade(Weighted):
    """It is made."""


class WeightedOrder(Weighted):
    """It gives an order."""


class Worker(Event):
    """The generators of a loader worker, at its start and after each batch: checksums of their states.

    :ivar generators: those that the data set holds
    :ivar worker: its own
    """

    generators: Sequence[int]
    worker: Sequence[int]


class Seed(Event):
    """NumPy's or Python's generator is seeded."""


class Draw(Event):
    """The script draws random numbers.

    :ivar function: in torch
    """

    function: str
    shape: Sequence[int]
    checksum: int


# Files.


class File(Event):
    """A file is used.

    :ivar path: absolute; None for a stream that has none
    """

    path: str | None


class Save(File):
    """torch.save has ended.

    :ivar live: whether it held parameters that a step may change meanwhile
    :ivar states: the kinds of state in it: model, optimizer
    :ivar checksums: of its tensors
    """

    live: bool
    states: Sequence[str]
    checksums: Sequence[int]


class Load(File):
    """torch.load begins."""


class Rename(File):
    """A file gets this name."""
