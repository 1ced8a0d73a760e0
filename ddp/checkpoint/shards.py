"""The state of a sharded job: each rank writes its own part, and takes its part of what any other job has written.

No rank ever has more than its own part and, while it reads, one whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.training.models import persistent_buffers
from common.training.optimization import STATE_OF, Entry, local
from ddp.checkpoint.folder import Damaged, load
from ddp.checkpoint.layout import Part, layout_of
from ddp.checkpoint.pieces import Piece, Place, Saved, assemble, is_sharded, open_shards, read, shard_content
from ddp.job import Job
from ddp.sharded.zero1 import ZeRO1

WEIGHT = "model"  # pieces are named "model:NAME" and, after the optimizer's own words, "exp_avg:NAME"
NUMBER = Place(0, (), ())  # of a 0-d tensor


def state_of_shard(job: Job, buffers: Mapping[str, Tensor]) -> dict[str, Any]:
    """What this rank writes. Tensors are not copied, except for pieces in the memory of whole parameters.

    :param buffers: of the plain module, by name; rank 0 writes them
    """
    pieces: dict[str, Piece] = {}
    stateless: list[str] = []
    first, layout = job.env.is_main, layout_of(job.network)
    for name, part in layout.items():
        if first or not part.replicated:
            values = flat(part.parameter)
            # torch.save writes whole storages: without the copy, those of the whole parameters.
            pieces[f"{WEIGHT}:{name}"] = Piece(values.clone() if part.in_full else values, part.place)
        state = {key: value for key, value in job.optimizer.state.get(part.parameter, {}).items() if value is not None}
        if part.parameter.requires_grad and not state:
            stateless.append(name)
        for key, value in state.items():
            if value.dim():
                pieces[f"{key}:{name}"] = Piece(flat(value), part.place)
            elif first:  # Adam's count of steps, the same on every rank
                pieces[f"{key}:{name}"] = Piece(value.view(1), NUMBER)
    if first:
        pieces |= {f"{WEIGHT}:{name}": Piece.of_whole(value) for name, value in buffers.items()}
    return shard_content(pieces, list(layout), _tied(job.named_module), stateless)


def restore_shard(job: Job, path: Path, may_be_empty: bool) -> None:
    """Take this rank's part of the parameters and the optimizer's state from a verified checkpoint of any strategy.

    :param may_be_empty: whether the optimizer of replicas may have kept nothing yet
    :raises Damaged: when it holds other tensors than this job's: a forged file can have a matching digest
    """
    layout, expected = layout_of(job.network), STATE_OF[type(job.optimizer)]
    if is_sharded(path):
        saved, _, _, stateless = open_shards(path)
    else:
        saved = _open_whole(path, list(layout))
        has_state = any(not name.startswith(f"{WEIGHT}:") for name in saved)
        stateless = [] if has_state or not may_be_empty else list(layout)
    buffers = dict(job.named_module.named_buffers(remove_duplicate=False))
    known = {f"{kind}:{name}" for kind in (WEIGHT, *expected) for name in (*layout, *_tied(job.named_module))}
    job.optimizer.state.clear()
    try:
        if unknown := sorted(saved.keys() - known - {f"{WEIGHT}:{name}" for name in buffers}):
            raise LookupError(f"has {unknown[0][:60]}, which the run has not")
        for name in sorted(persistent_buffers(job.named_module)):
            place, buffer = Place.of_whole(buffers[name]), buffers[name]
            flat(buffer).copy_(_taken(saved, f"{WEIGHT}:{name}", buffer.numel(), place, buffer.dtype))
        for name, part in layout.items():
            flat(part.parameter).copy_(_taken(saved, f"{WEIGHT}:{name}", part.numel, part.place, part.parameter.dtype))
            if part.parameter.requires_grad and name not in stateless:
                job.optimizer.state[part.parameter] = _state_of(name, part, saved, expected)
    except LookupError as error:
        raise Damaged(path, str(error.args[0])) from error
    if isinstance(job.network, ZeRO1):
        job.network.shards_changed()


def _state_of(name: str, part: Part, saved: Saved, expected: Mapping[str, Entry]) -> dict[str, Tensor]:
    """What the optimizer keeps for this rank's part of one parameter."""
    if missing := [key for key in expected if f"{key}:{name}" not in saved]:
        raise LookupError(f"lacks {', '.join(missing)} of {name}")
    state: dict[str, Tensor] = {}
    for key, entry in expected.items():
        if entry.like_parameter:
            state[key] = torch.zeros_like(part.parameter, requires_grad=False)
            flat(state[key]).copy_(_taken(saved, f"{key}:{name}", part.numel, part.place, state[key].dtype))
        else:  # fused optimizers want it on the parameter's device
            state[key] = _taken(saved, f"{key}:{name}", 1, NUMBER, torch.float32).view(()).to(part.parameter.device)
    return state


def assembled(path: Path, kind: str) -> Any:
    """What a job of replicas would have written, put together from a verified sharded checkpoint.

    :param kind: ``"model"`` or ``"optimizer"``
    :returns: the state dict of the plain module, or that of the optimizer without the settings of its parameter groups
    :raises Damaged: when the pieces are not those of whole tensors
    """
    pieces, parameters, tied, _ = open_shards(path)
    numbers = {name: number for number, name in enumerate(parameters)}
    weights: dict[str, Tensor] = {}
    state: dict[int, dict[str, Tensor]] = {}
    try:
        for both, parts in pieces.items():
            key, _, name = both.partition(":")
            if kind == WEIGHT == key:
                weights[name] = assemble(both, parts)
            elif kind != WEIGHT != key:
                if name not in numbers:
                    raise LookupError(f"has {both[:60]}, but no such parameter")
                state.setdefault(numbers[name], {})[key] = assemble(both, parts)
        if kind == WEIGHT:
            if lacking := [name for name in tied.values() if name not in weights]:
                raise LookupError(f"lacks {lacking[0][:60]}")
            return weights | {alias: weights[name] for alias, name in tied.items()}
    except LookupError as error:
        raise Damaged(path, str(error.args[0])) from error
    return {"state": state, "param_groups": [{"params": list(numbers.values())}]}


def _open_whole(path: Path, parameters: list[str]) -> Saved:
    """The files of a job of replicas, mapped, as pieces that are whole tensors."""
    weights, optimizer = load(path, "model", mapped=True), load(path, "optimizer", mapped=True)
    saved: Saved = {}
    try:
        named = [(WEIGHT, name, value) for name, value in weights.items()]
        for number, state in optimizer["state"].items():
            named += [(key, parameters[number], value) for key, value in state.items() if value is not None]
        for key, name, value in named:
            saved[f"{key}:{name}"] = [Piece.of_whole(value)]
    except (AttributeError, LookupError, TypeError) as error:  # of what is no dict, or no tensor
        raise Damaged(path, "model.pt or optimizer.pt holds something else than a run writes") from error
    return saved


def _taken(saved: Saved, name: str, numel: int, place: Place, dtype: torch.dtype) -> Tensor:
    taken = read(name, saved.get(name, []), numel, place)
    if taken.dtype != dtype:
        raise LookupError(f"has {name} in {taken.dtype} instead of {dtype}")
    return taken


def flat(tensor: Tensor) -> Tensor:
    """This rank's part as it lies in memory: ``[n]``, to be read or written."""
    own = local(tensor.detach())
    order = sorted(range(own.dim()), key=own.stride, reverse=True)
    return own.permute(order).view(-1)


def _tied(module: nn.Module) -> dict[str, str]:
    """The further names of parameters that several modules hold, each with the first."""
    first: dict[nn.Parameter, str] = {}
    names = {name: first.setdefault(value, name) for name, value in module.named_parameters(remove_duplicate=False)}
    return {alias: name for alias, name in names.items() if alias != name}
