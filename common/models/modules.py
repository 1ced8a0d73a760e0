"""Ways to handle any module: to a device, without gaps in memory, its buffers, in evaluation."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import UsageError


def to_device(network: nn.Module, device: torch.device, memory_format: torch.memory_format) -> nn.Module:
    """The network there, in this memory format, and dense. One on the meta device stays, until it is sharded.

    :raises UsageError: as :func:`make_dense`, and for two parameters in the same memory of which each would get its own
    """
    shared = shared_memory(network)
    make_dense(network)
    if not any(parameter.is_meta for parameter in network.parameters()):
        network = network.to(device, memory_format=memory_format)  # type: ignore[call-overload]
    for one, other in sorted(shared - shared_memory(network)):
        raise UsageError(
            f"{one} and {other} share memory, but are two parameters, which another layout or device separates: let both modules have "
            "the same one"
        )
    return network


def shared_memory(network: nn.Module) -> set[tuple[str, str]]:
    """The names of two parameters that begin in the same memory, as after ``nn.Parameter(other.data)``."""
    at: dict[int, str] = {}
    named = [(name, one.data_ptr()) for name, one in network.named_parameters() if one.numel() and not one.is_meta]
    return {(other, name) for name, place in named if (other := at.setdefault(place, name)) != name}


def make_dense(network: nn.Module) -> None:
    """Give each parameter and buffer memory without gaps, in place. Values and objects stay the same.

    All that follows walks memory, not elements: what gloo sends (pytorch#192920), fused optimizers, buckets, shards, checkpoints.
    With ``nn.Parameter(torch.randn(36, 8)[:, ::2])``, all of them would be wrong without an error.

    :raises UsageError: for a parameter whose elements share memory, which no optimizer can update, and for an embedding whose
        gradients are sparse, or that changes its weights in forward, on several ranks
    """
    for name, module in network.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(f"{name} has sparse gradients, which are not averaged here: give it sparse=False")
    if problem := max_norm_problem(network):
        raise UsageError(problem)
    for name, tensor in itertools.chain(network.named_parameters(), network.named_buffers()):
        if torch.ops.aten.is_non_overlapping_and_dense(tensor):
            continue
        if isinstance(tensor, nn.Parameter) and 0 in tensor.stride():
            raise UsageError(f"parameter {name} was expanded, so its elements share memory: use .clone() on it")
        tensor.data = tensor.data.contiguous()


def max_norm_problem(network: nn.Module) -> str | None:
    """Why the ranks' embeddings would differ, for an error; None if they would not."""
    for name, module in network.named_modules():
        if getattr(module, "max_norm", None) is not None and dist.is_initialized() and dist.get_world_size() > 1:
            return (
                f"{name}: with max_norm, each rank would change the rows of its own batch: build it without max_norm, and normalize "
                "what it returns"
            )
    return None


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Those buffers that a ``state_dict`` has, by all of their names."""
    # HACK: no public name tells which buffers are persistent. If torch renames it, this raises.
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules(remove_duplicate=False)
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """A block with the network in evaluation mode; after it, the network is in the mode that it was in."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)
