"""Process groups of the stand-in: gloo in the place of NCCL, and what only NCCL or a GPU has."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .replacing import CPU, Substitute, called_by_torch, replace, without_gpu

_nccl = set[Any]()  # the groups that were asked for NCCL, by id; None is the default group


def replace_everywhere(*names: str) -> Callable[[Substitute], Substitute]:
    """Take the place of functions that are in ``torch.distributed``, in the module that defines them, and where meshes are made."""

    def decorate(substitute: Substitute) -> Substitute:
        for name in names:
            replace(c10d, name)(substitute)
            for module in (dist, device_mesh):
                if hasattr(module, name):
                    setattr(module, name, getattr(c10d, name))
        return substitute

    return decorate


def _arguments(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


@replace_everywhere("init_process_group", "new_group")
def make_group(original: Any, *args: Any, **kwargs: Any) -> Any:
    given = _arguments(original, args, kwargs)
    asked = given.pop("backend", None)
    for name in ("device_id", "pg_options"):
        given.pop(name, None)
    is_nccl = "nccl" in str(asked or "nccl").lower()
    group = original(**given, backend="gloo" if is_nccl else asked)
    if is_nccl:
        _nccl.add(None if group is None else id(group))
    return group


@replace(dist, "get_backend")
def get_backend(original: Any, group: Any = None) -> Any:
    """To the script, the backend that it has asked for."""
    asked = None if group in (None, dist.group.WORLD) else id(group)
    return original(group) if called_by_torch() or asked not in _nccl else "nccl"


replace_everywhere("is_nccl_available")(lambda original: True)


@replace_everywhere("barrier", "monitored_barrier")
def barrier(original: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("device_ids", None)
    return original(*args, **kwargs)


def _tensors(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments as gloo takes them. NCCL takes tensors that require gradients, and counts elements where gloo compares shapes."""
    tensors = {name: value.detach() for name, value in [*given.items()][:2] if isinstance(value, Tensor)}
    if len(tensors) > 1:
        tensors = {name: value.view(-1) for name, value in tensors.items()}
    return given | tensors


def _divide(result: Tensor, ranks: int) -> None:
    """In place; whole numbers stay whole."""
    has_fractions = result.is_floating_point() or result.is_complex()
    result.div_(ranks, rounding_mode=None if has_fractions else "trunc")


class _Divided:
    """A reduction that runs, and is divided when it is waited for."""

    def __init__(self, work: Any, result: Tensor, ranks: int) -> None:
        self._work, self._result, self._ranks = work, result, ranks

    def wait(self, *args: Any) -> Any:
        done = self._work.wait(*args)
        _divide(self._result, self._ranks)
        self._ranks = 1
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@replace_everywhere(
    "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"
)
def reduce(original: Any, *args: Any, **kwargs: Any) -> Any:
    """gloo has no average: it is a sum, divided."""
    given = _tensors(_arguments(original, args, kwargs))
    if given.get("op") != dist.ReduceOp.AVG:
        return original(**given)
    result = next(iter(given.values()))
    ranks = dist.get_world_size(given.get("group"))
    work = original(**given | {"op": dist.ReduceOp.SUM})
    if work is not None and given.get("async_op"):
        return _Divided(work, result, ranks)
    _divide(result, ranks)
    return work


@replace_everywhere(
    "all_gather", "all_gather_single", "all_gather_into_tensor", "_all_gather_base", "all_gather_coalesced"
)
def all_gather(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(**_tensors(_arguments(original, args, kwargs)))


@replace(DistributedDataParallel, "__init__")
def ddp_init(original: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    given = _arguments(original, (self, module, *args), kwargs)
    for name in ("device_ids", "output_device"):
        given.pop(name, None)
    original(**given)
    self.device_ids = None


@replace(FullyShardedDataParallel, "__init__")
def fsdp_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    given = _arguments(original, (self, *args), kwargs)
    original(**given | {"device_id": CPU})


@replace(DataParallel, "__init__")
def data_parallel_init(original: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    """On one device it is the module alone."""
    nn.Module.__init__(self)
    self.module, self.device_ids = module, []


@functools.cache
def _load_sync_batchnorm() -> Any:
    if "STAND_IN_SYNC_BATCHNORM" not in os.environ:  # on one rank, its statistics are those of all
        return nn.modules.batchnorm._BatchNorm
    spec = importlib.util.spec_from_file_location(
        f"{__package__}.sync_batchnorm", os.environ["STAND_IN_SYNC_BATCHNORM"]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SyncBatchNorm


# torch's own needs a GPU.
replace(nn.SyncBatchNorm, "forward")(lambda original, self, x: _load_sync_batchnorm().forward(self, x))
replace(DistributedDataParallel, "_passing_sync_batchnorm_handle")(lambda original, self, module: None)


def _mesh(original: Any, *args: Any, **kwargs: Any) -> Any:
    given = _arguments(original, args, kwargs)
    return original(**given | {"device_type": str(without_gpu(given["device_type"]))})


replace(device_mesh.DeviceMesh, "__init__")(_mesh)
replace(device_mesh, "init_device_mesh")(_mesh)
vars(dist)["init_device_mesh"] = device_mesh.init_device_mesh
