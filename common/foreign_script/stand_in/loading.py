"""Files, loaders, compilers and profilers that ask for a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.data
from torch.profiler import ProfilerActivity, profiler

from .replacing import is_gpu, replace, without_gpu


@replace(torch, "load")
def load(original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A file that was saved on a real GPU is loaded, too."""
    if isinstance(map_location, dict):
        map_location = {source: without_gpu(target) for source, target in map_location.items()} | {"cpu": "cpu"}
    elif map_location is None or is_gpu(map_location):
        map_location = "cpu"
    return original(f, map_location, *args, **kwargs)


@replace(torch.utils.data.DataLoader, "__init__")
def loader(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Without a thread that pins memory."""
    original(self, *args, **kwargs)
    self.pin_memory = False


@replace(torch, "compile")
def compile_(original: Any, model: Any = None, **kwargs: Any) -> Any:
    """A model that would be compiled runs as it is written."""
    return model if model is not None else lambda function: function


replace(torch.nn.Module, "compile")(lambda *args, **kwargs: None)


@replace(profiler._KinetoProfile, "__init__")
def profile(original: Any, self: Any, *, activities: Any = None, **kwargs: Any) -> None:
    original(self, activities=[ProfilerActivity.CPU], **kwargs)
