"""One call for all stages; an optimizer that was built before it is refused at its first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.training.models import max_norm_problem
from ddp.all_reduce.backend import another_group
from ddp.all_reduce.choice import build_all_reduce
from ddp.all_reduce.sharded import ShardedAllReduce
from ddp.sharded.flat import Precision, WatchedParameter
from ddp.sharded.zero1 import DEFAULT_PRECISION, ZeRO1
from ddp.sharded.zero2 import ZeRO2
from ddp.sharded.zero3 import ZeRO3

STAGES: dict[int, type[ZeRO1]] = {1: ZeRO1, 2: ZeRO2, 3: ZeRO3}


def shard(
    module: nn.Module,
    stage: int,
    *,
    units: Iterable[nn.Module] | None = None,
    precision: Precision | Mapping[nn.Module, Precision] = DEFAULT_PRECISION,
    all_reduce: str = "backend",
    device: torch.device | str = "cpu",
) -> ZeRO1:
    """Shard a model over the ranks; then build the optimizer from the ``parameters()`` of what this returns. A collective.

    :param stage: 1 shards the optimizer's state, 2 the gradients too, 3 the parameters too
    :param units: submodules whose parameters travel together, see :func:`ddp.sharded.units.divide`
    :param precision: the dtypes of computation and communication, of all units or by unit
    :param all_reduce: whose all-gather and reduce-scatter are used: ``"backend"``, ``"ring"`` or ``"shared-memory"``
    :param device: where to put what is on the meta device
    :raises ValueError: on every rank, for another stage or all-reduce, an embedding with ``max_norm``, and as
        :class:`ddp.sharded.zero1.ZeRO1`
    """
    if stage not in STAGES:
        raise ValueError(f"stage={stage}: there are 1 (optimizer state), 2 (gradients too) and 3 (parameters too)")
    if problem := max_norm_problem(module):
        raise ValueError(problem)
    originals = list(module.named_parameters())
    model = STAGES[stage](module, units, (_collectives(all_reduce), _collectives(all_reduce)), precision, device)
    kept = {*model.parameters(), *model._frozen.values()}
    for name, parameter in originals:
        if parameter not in kept:
            parameter._sharded_as = name  # type: ignore[attr-defined]
    return model


def _collectives(name: str) -> ShardedAllReduce:
    group = dist.distributed_c10d._get_default_group()
    if name == "backend":  # gathers and reductions run at the same time, each kind in an order of its own
        group = another_group(group)
    algorithm = build_all_reduce(name, group)
    if not isinstance(algorithm, ShardedAllReduce):
        algorithm.close()
        raise ValueError(
            f"all_reduce={name!r} has no reduce-scatter and all-gather: choose backend, ring or shared-memory"
        )
    return algorithm


def _require_shards(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Count the step as a write to the shards, which fused optimizers do not.

    :raises RuntimeError: for an optimizer of parameters that have been sharded since: its steps would change nothing
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, WatchedParameter):
                torch.autograd.graph.increment_version(parameter)
            if name := getattr(parameter, "_sharded_as", None):
                raise RuntimeError(
                    f"this {type(optimizer).__name__} was built before shard(): it has the parameter {name!r} from before, which "
                    "nothing trains any more. Build it afterwards, from the parameters() of what shard() returns"
                )


register_optimizer_step_post_hook(_require_shards)  # of every optimizer in this process; a look at each parameter
