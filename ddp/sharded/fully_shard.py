"""torch's ``fully_shard`` with the interface of the stages by hand: ``parameters()`` are this rank's part of each, under the plain module's
names; ``no_sync()``; ``process_group``; and ``module``, which is sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common.errors import UsageError
from common.models.modules import to_device
from ddp.by_hand.replicas import require_same_modules
from ddp.sharded.protected.initial_values import materialize
from ddp.sharded.protected.parameters import mark_replaced
from ddp.sharded.units import divide


class FullyShard(nn.Module):
    """torch's ``fully_shard``, with the units of :func:`ddp.sharded.units.divide`.

    :param module: the same on every rank, values included: nothing is sent
    :param device: where to put what is on the meta device
    :param low: dtype of computation, with gradients summed in fp32; the parameters' own when None
    """

    def __init__(self, module: nn.Module, low: torch.dtype | None, device: torch.device) -> None:
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes half a second to import

        # fully_shard takes contiguous parameters only.
        module = to_device(module, device, torch.contiguous_format)
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()
        require_same_modules(module, {"--strategy": "fsdp2"})
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32)
        root, *units = divide(module)
        for unit in units:
            if shared := [
                name for name, _ in unit.module.named_parameters() if f"{unit.name}.{name}" not in unit.owners
            ]:
                raise UsageError(
                    f"--strategy fsdp2: {unit.name}.{shared[0]} is used in several units, which fully_shard refuses: use zero3"
                )
        for unit in (root, *units):
            trained = {n: p for n, p in unit.module.named_parameters(unit.name) if n in unit.owners and p.requires_grad}
            for name, parameter in trained.items():
                first = next(iter(trained.values())).dtype
                if parameter.dtype != first or not parameter.numel():
                    raise UsageError(
                        f"--strategy fsdp2: {name} is {parameter.dtype} of {list(parameter.shape)}, but fully_shard takes parameters "
                        f"with elements, of one dtype ({first}) per unit: use zero3"
                    )
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for unit in (*units, root):  # fully_shard wants the root last
            materialize(unit, device)  # one unit at a time is whole
            replaced = {name: part.get_parameter(attribute) for name, ((part, attribute), *_) in unit.owners.items()}
            fully_shard(unit.module, mesh=mesh, mp_policy=policy)
            for name, parameter in replaced.items():
                mark_replaced(parameter, name)
        self.module: Any = module
        assert dist.group.WORLD is not None
        self.process_group = dist.group.WORLD

    def forward(self, *inputs: Any) -> Any:
        """``module``'s forward."""
        return self.module(*inputs)

    def named_parameters(self, *arguments: Any, **more: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own names; each parameter is a DTensor, sharded along its first dimension."""
        named: Iterator[tuple[str, nn.Parameter]] = self.module.named_parameters(*arguments, **more)
        return named

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this block, gradients are summed on this rank alone, and stay whole."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)
