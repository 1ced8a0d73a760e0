"""Tensors and modules that move between the CPU and a GPU: they stay where they are, and are copied where a move copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info
from torch.utils.weak import WeakTensorKeyDictionary

from .replacing import CPU, called_by_torch, is_gpu, replace, without_gpu

# The tensors that are known to be on the stand-in. (An attribute of a tensor would be saved with it.)
_moved = WeakTensorKeyDictionary()


def mark(tensor: Any) -> None:
    """Remember that a tensor is on the stand-in: it is not copied when it is moved there again."""
    # torch swaps the contents of others, such as DTensor, which it refuses if there is a weak reference.
    if type(tensor) in (Tensor, nn.Parameter):
        _moved[tensor] = True


def is_moved(tensor: Any) -> bool:
    """Whether a tensor is known to be on the stand-in. (A result of tensors there is not.)"""
    return tensor in _moved


def to_gpu(tensor: Tensor, moved: Tensor) -> Tensor:
    """A tensor of its own, as a copy on a GPU is: changes of it do not reach the CPU's, and it is no leaf.

    :param moved: the tensor in its new dtype and format, which may be the same
    """
    if moved is tensor and not is_moved(tensor):
        moved = tensor.clone()
    mark(moved)
    return moved


@replace(Tensor, "cuda")
def cuda(original: Any, self: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
    return to_gpu(self, self if memory_format is None else self.contiguous(memory_format=memory_format))


@replace(Tensor, "cpu")
def cpu(original: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A copy, as from a GPU."""
    moved = original(self, *args, **kwargs)
    return self.clone() if moved is self else moved


@replace(Tensor, "numpy")
def numpy(original: Any, self: Tensor, **kwargs: Any) -> Any:
    """Where autocast in fp16 runs in bf16, NumPy gets fp16: it has no bf16."""
    return original(self.half() if self.dtype == torch.bfloat16 else self, **kwargs)


@replace(Tensor, "to")
def to(original: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
    device = args[0] if args else kwargs.get("device")
    if device == "cpu":  # not the device of another tensor, which may be on the stand-in
        return cpu(original, self, *args, **kwargs)
    if not is_gpu(device):
        return original(self, *args, **kwargs)
    kwargs.pop("device", None)
    return to_gpu(self, original(self, CPU, *args[1:], **kwargs))


@replace(Tensor, "type")
def type_(original: Any, self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
        return to_gpu(self, original(self, dtype.replace("cuda.", ""), *args, **kwargs))
    return original(self, *([] if dtype is None else [dtype]), *args, **kwargs)


@replace(nn.Module, "to")
def module_to(original: Any, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if not is_gpu(device):
        return original(self, *args, **kwargs)
    kept = {"dtype": dtype, "memory_format": memory_format}
    kept = {name: value for name, value in kept.items() if value is not None}
    return _on_gpu(original(self, **kept) if kept else self)


@replace(nn.Module, "cuda")
def module_cuda(original: Any, self: nn.Module, device: Any = None) -> Any:
    return _on_gpu(self)


@replace(nn.Module, "to_empty")
def module_to_empty(original: Any, self: nn.Module, *, device: Any, recurse: bool = True) -> Any:
    return original(self, device=without_gpu(device), recurse=recurse)


def _on_gpu(module: nn.Module) -> nn.Module:
    """Its parameters are not copied: an optimizer may have them already."""
    for tensor in (*module.parameters(), *module.buffers()):
        mark(tensor)
    return module


@replace(nn.Parameter, "__new__")
def parameter(original: Any, cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
    made = original(cls, data, *args, **kwargs)
    if is_moved(data):
        mark(made)
    return made


replace(Tensor, "pin_memory")(lambda original, self, *args: self.clone())
replace(Tensor, "record_stream")(lambda *args: None)


_is_cuda: Any = Tensor.is_cuda
# A loader's worker makes tensors on the CPU; some libraries ask there, and refuse to send one of a GPU.
Tensor.is_cuda = property(  # type: ignore[assignment]
    lambda self: _is_cuda.__get__(self) if called_by_torch() or get_worker_info() else True
)


@replace(Tensor, "get_device")
def get_device(original: Any, self: Tensor) -> Any:
    return original(self) if called_by_torch() else torch.cuda.current_device()


@replace(torch.UntypedStorage, "cuda")
@replace(torch.TypedStorage, "cuda")
def storage_cuda(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return self
