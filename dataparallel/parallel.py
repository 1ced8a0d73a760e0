"""``nn.DataParallel`` by hand: one process, many devices, four steps in every forward pass.

1. :func:`scatter` cuts the batch into a part per device and sends each there.
2. :func:`replicate` copies the module's parameters and buffers to every device, in *every* forward pass: the optimizer
   changes only the module on the first device, so older replicas are out of date.
3. :func:`parallel_apply` runs each replica on its part, in a thread per device.
4. :func:`gather` brings the outputs to the first device and joins them.

Backward takes the steps in reverse order. Autograd derives three of them: it splits gather's gradient, runs each replica's
backward pass, and joins scatter's gradients. The fourth, in dataparallel/broadcast.py, sums the replicas' gradients on the
first device, where the optimizer uses them.

The steps follow torch/nn/parallel (data_parallel.py, scatter_gather.py, replicate.py, parallel_apply.py, _functions.py), and
the results are equal. Beyond torch's: CPU devices; errors that name the argument or the device; a parameter that no replica used
keeps ``grad`` None, as in the plain module.
"""

from __future__ import annotations

import functools
import itertools
import reprlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

# HACK: private, but torch.export and torch.compile stand on it. Another name would be an ImportError.
from torch.utils._pytree import keystr, tree_flatten, tree_leaves_with_path, tree_unflatten

from dataparallel.broadcast import Broadcast, StepContext, send
from dataparallel.devices import check_devices
from dataparallel.threads import divided_cores, run_in_threads


class HandwrittenDataParallel(nn.Module):
    """Run ``module`` on several devices at once, each with its part of the batch.

    Its outputs are those of the plain module on the whole batch, as long as samples do not depend on each other: BatchNorm
    in training normalizes each part by itself, and only the first replica's part updates the running statistics.

    :param module: on the first device; its parameters and ``state_dict`` stay there, below ``module.``
    :param devices: GPUs, or the CPU several times (see :mod:`dataparallel.devices`); the first holds the module
    :param dim: the dimension of inputs and outputs that counts samples
    :raises ValueError: for devices that are not there or of two kinds
    """

    step: StepContext = staticmethod(record_function)

    def __init__(self, module: nn.Module, devices: Sequence[torch.device | str | int], dim: int = 0) -> None:
        super().__init__()
        self.module = module
        self.devices = check_devices(devices)
        self.dim = dim

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs for these arguments.

        Tensors in them, also in nested tuples, lists and dicts, are scattered; all else goes to every replica as it is. A
        batch of fewer samples than devices leaves the last ones idle.

        :raises ValueError: for arguments that cannot be scattered
        :raises RuntimeError: for a module that is not on the first device
        :raises Exception: of a replica, with its number and device before the message
        """
        self._check_module()
        with divided_cores(self.devices):
            with self.step("scatter"):
                parts = scatter((args, kwargs), self.devices, self.dim)
            if len(self.devices) == 1:
                return _call(self.module, parts[0])
            with self.step("replicate"):
                replicas = replicate(self.module, self.devices[: len(parts)], self.step)
            with self.step("forward"):
                outputs = parallel_apply(replicas, parts, self.devices)
            with self.step("gather"):
                return gather(outputs, self.devices[0], self.dim)

    def _check_module(self) -> None:
        for name, tensor in itertools.chain(self.module.named_parameters(), self.module.named_buffers()):
            if tensor.device != self.devices[0]:
                raise RuntimeError(
                    f"the module's {name} is on {tensor.device}, and not on the first device, {self.devices[0]}: "
                    f"call module.to({str(self.devices[0])!r}) first"
                )


# --- 1. scatter ---------------------------------------------------------------------------------------------------------


def scatter(
    arguments: tuple[tuple[Any, ...], dict[str, Any]], devices: Sequence[torch.device], dim: int = 0
) -> list[Any]:
    """Cut all tensors along ``dim`` and send the i-th piece of each to the i-th device.

    Pieces are of equal size, as ``torch.chunk`` makes them, except the last, which may be smaller; of ``n`` samples at most
    ``n`` pieces are made. Other values are repeated for each device.

    :param arguments: positional ones and keyword ones; tensors in nested tuples, lists and dicts count
    :returns: for each device that got a piece, the same structure; at least one
    :raises ValueError: when there is no tensor, one is not dense or lacks the dimension, or they differ in size along it
    """
    leaves, structure = tree_flatten(arguments)
    size = _batch_size(arguments, dim)
    length = max(1, -(-size // len(devices)))
    starts = range(0, max(1, size), length)

    def part(value: Any, start: int, device: torch.device) -> Any:
        if not isinstance(value, Tensor):
            return value
        piece = value.narrow(dim, start, min(length, size - start))
        own = len(starts) > 1  # no views of one tensor: each replica may change its piece in place
        return piece.to(device, non_blocking=True, copy=own)

    return [
        tree_unflatten([part(leaf, start, device) for leaf in leaves], structure)
        for start, device in zip(starts, devices, strict=False)
    ]


def _batch_size(arguments: tuple[tuple[Any, ...], dict[str, Any]], dim: int) -> int:
    """The size along ``dim`` that all tensors have."""
    args, kwargs = arguments
    named = [(f"args{keystr(path)}", value) for path, value in tree_leaves_with_path(args)]
    named += [(f"kwargs{keystr(path)}", value) for path, value in tree_leaves_with_path(kwargs)]
    sizes: dict[str, int] = {}
    for name, value in named:
        if isinstance(value, dict | list | tuple):
            raise ValueError(f"{name} cannot be scattered: it is a {type(value).__name__}; pass a plain container")
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_nested:
                raise ValueError(f"{name} cannot be scattered: only dense tensors can be cut, and it is not")
            if not -value.dim() <= dim < value.dim():
                raise ValueError(f"{name} cannot be scattered: its shape {list(value.shape)} has no dimension {dim}")
            sizes[name] = value.size(dim)
    if not sizes:
        raise ValueError("nothing to scatter: the module was called without any tensor")
    (first, size), *others = sizes.items()
    for name, other in others:
        if other != size:
            raise ValueError(
                f"{name} has {other} samples in dimension {dim} and {first} has {size}: "
                "all tensors must be of the same batch (pass a constant as something else, or expand it)"
            )
    return size


# --- 2. replicate -------------------------------------------------------------------------------------------------------


def replicate(
    module: nn.Module, devices: Sequence[torch.device], step: StepContext = record_function
) -> list[nn.Module]:
    """A copy of the module on every device, made for one forward pass.

    The first replica shares the module's own tensors: what it changes in place (BatchNorm's running statistics) stays; the
    other replicas' changes are lost with them. Replicas' parameters are no leaves: a gradient that reaches one travels on to
    the module's, by ``Broadcast``. So a replica's ``parameters()`` is empty, as in torch/nn/parallel/replicate.py.

    :param step: context manager around the reduction in the backward pass, called as ``step("reduce")``
    """
    buffers = list(module.buffers())
    learned = [*module.parameters(), *(buffer for buffer in buffers if buffer.requires_grad)]
    constant = [buffer for buffer in buffers if not buffer.requires_grad]
    copies = Broadcast.apply(step, devices, *learned)
    replicas = []
    for number, device in enumerate(devices):
        own_learned = copies[number * len(learned) : (number + 1) * len(learned)]
        own_constant = constant if number == 0 else send(constant, device)
        copy_of = dict(zip(learned + constant, [*own_learned, *own_constant], strict=True))
        replicas.append(_replica(module, copy_of))
    return replicas


def _replica(module: nn.Module, copy_of: dict[Tensor, Tensor]) -> nn.Module:
    """A shallow copy of every module in the tree, with the tensors of ``copy_of``."""
    shallow: dict[nn.Module, nn.Module] = {
        original: original._replicate_for_data_parallel() for original in module.modules()
    }
    for original, replica in shallow.items():
        for name, child in original._modules.items():
            replica._modules[name] = None if child is None else shallow[child]
        for name, parameter in original._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, copy_of[parameter])  # no leaf, so no nn.Parameter: an attribute
        for name, buffer in original._buffers.items():
            if buffer is not None:
                replica._buffers[name] = copy_of[buffer]
    return shallow[module]


# --- 3. parallel_apply --------------------------------------------------------------------------------------------------


def parallel_apply(replicas: Sequence[nn.Module], parts: Sequence[Any], devices: Sequence[torch.device]) -> list[Any]:
    """Call each replica with its part, all at once, each in a thread.

    Python runs one thread at a time (the GIL): the replicas compute at once only while each is inside a kernel that has let
    go of it, or has queued its kernels on its GPU.

    :param parts: for each replica, ``(args, kwargs)``
    :returns: the replicas' outputs, in their order
    :raises Exception: of the first replica that failed, with its number and device before the message
    """
    calls = [functools.partial(_call, replica, part) for replica, part in zip(replicas, parts, strict=True)]
    return run_in_threads(calls, devices)


def _call(module: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = arguments
    return module(*args, **kwargs)


# --- 4. gather ----------------------------------------------------------------------------------------------------------


def gather(outputs: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """Join the replicas' outputs on one device.

    Tensors, also in nested tuples, lists and dicts, are concatenated along ``dim``; scalars (0-d) become a vector with one
    element per replica. Other values must be the same from all.

    :raises TypeError: for outputs of different structures, or that are neither tensors nor the same
    """
    leaves, structures = zip(*map(tree_flatten, outputs), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise TypeError(f"the replicas return different structures: {' and '.join(map(str, structures))}")

    def join(*values: Any) -> Any:
        first = values[0]
        if all(isinstance(value, Tensor) for value in values):
            there = [value.to(device) for value in values]
            return torch.stack(there) if first.dim() == 0 else torch.cat(there, dim)
        for value in values:
            if value is not first and not (isinstance(value, bool | int | float | str) and value == first):
                raise TypeError(
                    f"the replicas return {reprlib.repr(first)} and {reprlib.repr(value)}: only tensors can be joined, "
                    "the rest must be the same"
                )
        return first

    return tree_unflatten(list(map(join, *leaves)), structures[0])
