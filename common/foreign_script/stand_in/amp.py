"""Automatic mixed precision of the stand-in: the CPU's, with bf16 in the place of fp16, in which CPUs are slow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.autocast_mode import autocast

from .replacing import replace, say

LOW = (torch.bfloat16, torch.float16)


@replace(autocast, "__init__")
def autocast_init(original: Any, self: Any, device_type: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
    if device_type == "cuda":
        device_type = "cpu"
        if dtype in (None, torch.float16):
            dtype = torch.bfloat16
            if args[0] if args else kwargs.get("enabled", True):
                say("autocast in float16 runs in bfloat16")
    original(self, device_type, dtype, *args, **kwargs)


# A GPU's autocast takes the widest of their inputs' dtypes; a CPU's leaves them to fail.
_WIDEST = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sampler",
    "index_put",
    "scatter_add",
    "tensordot",
)


def _in_the_widest(original: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.is_autocast_enabled("cpu"):
        dtypes = {one.dtype for one in args if isinstance(one, Tensor) and one.is_floating_point()}
        if len(dtypes) > 1:
            args = tuple(one.float() if isinstance(one, Tensor) and one.dtype in LOW else one for one in args)
    return original(*args, **kwargs)


replace(torch, *_WIDEST)(_in_the_widest)
replace(Tensor, *_WIDEST)(_in_the_widest)


def _for_the_cpu(original: Any, device_type: Any = "cpu", *args: Any) -> Any:
    return original("cpu" if device_type == "cuda" else device_type, *args)


replace(torch, "is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype")(_for_the_cpu)
torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cpu")
