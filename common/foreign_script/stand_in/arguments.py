"""Functions with an argument that may name a GPU: they get the CPU in its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext, _device_constructors

from .randomness import drawn_on_gpu
from .replacing import is_gpu, replace, without_gpu
from .tensors import is_moved, mark

_NAMESPACES = (torch, torch.fft, torch.nested, torch.signal.windows)
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_tensor", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full")
_MAY_SHARE = ("as_tensor", "asarray")  # their result may lie in the memory of what they are given


def _on_gpu(original: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_gpu(kwargs.get("device")):
        return original(*args, **kwargs)
    with drawn_on_gpu():
        made = original(*args, **kwargs | {"device": "cpu"})
    if original.__name__ in _MAY_SHARE:
        made = made.clone()
    mark(made)
    return made


def _like_one_on_gpu(original: Any, like: Tensor, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    on_gpu = {"device": "cuda"} if is_gpu(device) or (device is None and is_moved(like)) else {}
    return _on_gpu(original, like, *args, **kwargs | on_gpu)


for _namespace in _NAMESPACES:
    for _name, _function in vars(_namespace).copy().items():
        if callable(_function) and _function in _device_constructors():
            replace(_namespace, _name)(_on_gpu)
replace(torch, *_LIKE)(_like_one_on_gpu)
replace(Tensor, *_NEW)(_on_gpu)


@replace(torch, "set_default_device")
def set_default_device(original: Any, device: Any) -> None:
    original(without_gpu(device))


@replace(torch, "set_default_tensor_type")
def set_default_tensor_type(original: Any, kind: Any) -> None:
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    original(name.replace("torch.cuda.", "torch."))


@replace(DeviceContext, "__init__")  # with torch.device("cuda"): ...
def device_context(original: Any, self: Any, device: Any) -> None:
    original(self, without_gpu(device))


class _Generators(type(torch.Generator)):  # type: ignore[misc]
    """torch's own generators are instances, too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Generator)


_Generator = torch.Generator


class Generator(_Generator, metaclass=_Generators):
    """A generator of the CPU, whichever device it is for."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _Generator(without_gpu(device))


torch.Generator = Generator  # type: ignore[misc]
