"""One call for all stages, and the one that ``--strategy`` of ddp.train takes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from common.training.precision import LOW_DTYPES
from ddp.all_reduce.backend import another_group
from ddp.all_reduce.choice import build_all_reduce
from ddp.all_reduce.sharded import ShardedAllReduce
from ddp.sharded.fully_shard import FullyShard
from ddp.sharded.protected.model import ProtectedZeRO1, ProtectedZeRO2, ProtectedZeRO3
from ddp.strategies import STAGES

CLASSES: dict[int, type[ProtectedZeRO1]] = {1: ProtectedZeRO1, 2: ProtectedZeRO2, 3: ProtectedZeRO3}


def shard(
    module: nn.Module,
    stage: int,
    *,
    units: Iterable[nn.Module] | None = None,
    compute: torch.dtype | None = None,
    all_reduce: str = "backend",
    device: torch.device | str = "cpu",
) -> ProtectedZeRO1:
    """Shard a model over the ranks; then build the optimizer from the ``parameters()`` of what this returns. A collective.

    :param stage: 1 shards the optimizer's state, 2 the gradients too, 3 the parameters too
    :param units: submodules whose parameters travel together, see :func:`ddp.sharded.units.divide`
    :param compute: the dtype in which parameters are sent and computed with; their own when None
    :param all_reduce: whose all-gather and reduce-scatter are used: ``"backend"``, ``"ring"`` or ``"shared-memory"``
    :param device: where to put what is on the meta device
    :raises ValueError: on every rank, for another stage or all-reduce, and as :class:`ddp.sharded.protected.model.ProtectedZeRO1`
    """
    if stage not in CLASSES:
        raise ValueError(f"stage={stage}: there are 1 (optimizer state), 2 (gradients too) and 3 (parameters too)")
    collectives = _collectives(all_reduce), _collectives(all_reduce)
    return CLASSES[stage](module, units, collectives, compute=compute, device=device)


def _collectives(name: str) -> ShardedAllReduce:
    group = dist.group.WORLD
    assert group is not None
    if name == "backend":  # gathers and reductions are in flight at once, so each has its own process group
        group = another_group(group)
    algorithm = build_all_reduce(name, group)
    if not isinstance(algorithm, ShardedAllReduce):
        algorithm.close()
        raise ValueError(
            f"all_reduce={name!r} has no reduce-scatter and all-gather: choose backend, ring or shared-memory"
        )
    return algorithm


def shard_network(
    network: nn.Module, env: DistEnv, strategy: str, all_reduce: str | None = None, precision: str = "fp32"
) -> nn.Module:
    """The network, sharded over all ranks. A collective.

    In bf16 and fp16, parameters are gathered in that dtype. If they were gathered in fp32, autocast would cast them, and autograd
    would keep these whole copies until backward. Gradients are summed in fp32. With BatchNorm, whose statistics and parameters
    must be of one dtype, all of that stays fp32.

    :param network: the same on every rank
    :param strategy: one of :data:`ddp.strategies.SHARDED`
    :param all_reduce: whose reduce-scatter and all-gather the hand-written stages use; ``"backend"`` when None
    :param precision: one of :data:`common.training.precision.PRECISIONS`
    :raises UsageError: on every rank, for a model that shards cannot train, see :func:`ddp.sharded.stages.shard`, and for
        ``fsdp2`` one with a parameter that several units share
    """
    has_batchnorm = any(isinstance(part, _BatchNorm) for part in network.modules())
    low = None if has_batchnorm else LOW_DTYPES.get(precision)
    with env.fail_together():
        try:
            if strategy == "fsdp2":
                return FullyShard(network, low, env.device)
            stage = STAGES[strategy]
            return shard(network, stage, compute=low, all_reduce=all_reduce or "backend", device=env.device)
        except ValueError as error:
            raise UsageError(f"--strategy {strategy}: {error}") from error
