"""What a rank holds within forward and backward only: activations, buckets, and at stage 3 the units that are whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from common.training.gpt import GPT
from ddp.bench.memory.config import MemoryConfig
from ddp.bench.memory.storages import storages
from ddp.bench.sharding import VOCABULARY

IN_PASSES = ("activations", "buckets", "largest unit", "gathered")


def formula_of_passes(config: MemoryConfig, stage: int | None) -> dict[str, float]:
    """Bytes of each of :data:`IN_PASSES`; those that a stage does not have are left out.

    Autograd keeps 16 ``width`` numbers for each token and block: of ``width`` the inputs of both norms and of the four linear
    layers before the last (3 of them in the attention: query, key, value), its output, and twice 4 ``width`` around the
    GELU. Then come the last norm's input and output, and the logarithms of probabilities. (Korthikanti et al., Reducing
    Activation Recomputation in Large Transformer Models, 2022, arXiv 2205.05198, count 17: their attention copies its output.)

    :param stage: 0 for replicas, None for ``fully_shard``
    """
    size = 2 if config.low_precision and stage != 0 else 4  # bytes of an element in computation
    tokens = config.sequences * config.length
    with torch.device("meta"):
        network = GPT(VOCABULARY, config.width, config.layers, config.length)
    parameters = _elements(network)
    found = {"activations": size * tokens * (16.0 * config.width * config.layers + 2 * config.width + VOCABULARY)}
    if stage == 0:
        found["buckets"] = size * parameters
    if stage == 3:
        unit = _elements(network.blocks[0])
        root = parameters - config.layers * unit
        found["largest unit"] = size * max(unit, root)
        found["gathered"] = size * (root + min(2, config.layers) * unit)
    return found


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Activations:
    """The memory that autograd keeps from forward to backward and that is no parameter's: ``nbytes`` of the last forward pass.

    :param network: its layers run one after the other, and each uses its own parameters only
    """

    def __init__(self, network: nn.Module) -> None:
        self._kept: dict[int, int] = {}  # bytes of a storage, by its address
        self._parameters: dict[int, int] = {}  # of the layer that runs: at stage 3, others' addresses are used again
        for layer in network.modules():
            if next(layer.parameters(recurse=False), None) is not None:
                layer.register_forward_pre_hook(self._begin)
                layer.register_forward_hook(self._end)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """A block around a forward pass."""
        self._kept.clear()
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _begin(self, layer: nn.Module, _: object) -> None:
        self._parameters = storages(layer.parameters(recurse=False))

    def _end(self, *_: object) -> None:
        self._parameters = {}

    def _pack(self, tensor: Tensor) -> Tensor:
        found = storages([tensor])
        if not found.keys() & self._parameters.keys():
            self._kept |= found
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(self._kept.values())


class Gathered:
    """The memory of whole parameters at stage 3: after each start of a gather, the most is noted.

    ``largest`` is the largest unit's, ``most`` that of all units at one time; bytes.
    """

    def __init__(self, model: Any) -> None:
        self.most = self.largest = 0
        self._model = model
        for flat in model.flats:
            flat.start_gather = functools.partial(self._counted, flat.start_gather)

    def _counted(self, start_gather: Callable[[], None]) -> None:
        start_gather()
        of_units = [
            sum(flat.full.untyped_storage().nbytes() for flat in flats) for flats in self._model._flats_of.values()
        ]
        self.most, self.largest = max(self.most, sum(of_units)), max(self.largest, *of_units)
