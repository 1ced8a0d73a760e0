"""``torch.cuda`` and ``torch.accelerator`` of the stand-in: as many devices as there are ranks, streams without delay, and no memory."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from . import randomness
from .replacing import COUNT, replace

NAME = "stand-in GPU"
CAPABILITY = (8, 0)  # an A100's, whose 80 GiB it says that it has
MEMORY = 80 << 30

_current = 0


def _index(device: Any) -> int:
    index = device if isinstance(device, int | None) else torch.device(device).index
    return _current if index is None else index


def set_device(device: Any) -> None:
    """:raises RuntimeError: as CUDA does, for a device that is not there"""
    global _current
    index = _index(device)
    if index >= COUNT:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal (device {index} of {COUNT} stand-in GPUs, one for each rank)"
        )
    if index >= 0:
        _current = index


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class Stream:
    """Work in it is done when it is queued."""

    cuda_stream = stream_id = 0
    synchronize = wait_stream = wait_event = __exit__ = _nothing
    query, is_capturing = _always(True), _always(False)

    def __init__(self, device: Any = None, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", _index(device))

    def record_event(self, event: Any = None) -> Any:
        recorded = event or Event()
        recorded.record()
        return recorded

    def __enter__(self) -> Stream:
        return self


class Event:
    """A moment."""

    _at = 0.0
    __init__ = synchronize = wait = _nothing
    query = _always(True)

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """In milliseconds."""
        return 1e3 * (end._at - self._at)


@contextlib.contextmanager
def _block(stream: Any = None, *args: Any) -> Iterator[Any]:
    """A block that changes nothing."""
    yield stream


class device:
    """A block with this current device."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        self.prev_idx = _current
        set_device(self.idx)

    def __exit__(self, *error: object) -> None:
        set_device(self.prev_idx)


def properties(device: Any = None) -> Any:
    major, minor = CAPABILITY
    return SimpleNamespace(
        name=NAME,
        major=major,
        minor=minor,
        total_memory=MEMORY,
        multi_processor_count=108,
        uuid=_index(device),
        pci_domain_id=0,
        pci_bus_id=0,
        pci_device_id=0,
    )


_FUNCTIONS: dict[str, Any] = {
    **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported", "is_tf32_supported"), _always(True)),
    "is_current_stream_capturing": _always(False),
    "device_count": _always(COUNT),
    "current_device": lambda: _current,
    "set_device": set_device,
    "device": device,
    "device_of": lambda tensor: device(None),
    "get_device_name": _always(NAME),
    "get_device_capability": _always(CAPABILITY),
    "get_device_properties": properties,
    **dict.fromkeys(
        (
            "init",
            "synchronize",
            "empty_cache",
            "ipc_collect",
            "set_stream",
            "_lazy_init",
            "set_per_process_memory_fraction",
            "reset_peak_memory_stats",
            "reset_max_memory_allocated",
        ),
        _nothing,
    ),
    "Stream": Stream,
    "Event": Event,
    **dict.fromkeys(("stream", "StreamContext"), _block),
    **dict.fromkeys(("current_stream", "default_stream"), Stream),
    "mem_get_info": _always((MEMORY, MEMORY)),
    "memory_stats": lambda device=None: defaultdict(int),
    "memory_summary": _always(""),
    **{f"{begin}memory_{end}": _always(0) for begin in ("", "max_") for end in ("allocated", "reserved", "cached")},
    **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), randomness.seed),
    "get_rng_state": randomness.get_state,
    "get_rng_state_all": lambda: [randomness.get_state()] * COUNT,
    "set_rng_state": randomness.set_state,
    "set_rng_state_all": lambda states: randomness.set_state(states[_current]),
}
_MODULES = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams)
_KEPT = ("check_error", "get_sync_debug_mode", "get_gencode_flags")


def _take_the_place_of(module: ModuleType, functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        if isinstance(function, type) and hasattr(module, name):
            setattr(module, name, function)
        else:
            replace(module, name)(functools.partial(_instead, function))


def _instead(function: Callable[..., Any], original: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _needs_a_gpu(original: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(f"{original.__module__}.{original.__name__} needs a GPU, and has no stand-in")


for _module in _MODULES:
    _take_the_place_of(_module, _FUNCTIONS)
for _name, _function in vars(torch.cuda).copy().items():
    _is_torch_s = str(getattr(_function, "__module__", "")).startswith("torch.cuda") and callable(_function)
    if _is_torch_s and _name.islower() and not _name.startswith("_") and _name not in (*_FUNCTIONS, *_KEPT):
        replace(torch.cuda, _name)(_needs_a_gpu)
replace(torch.cuda.CUDAGraph, "__new__")(_needs_a_gpu)
for _kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool"):
    setattr(torch.cuda, f"{_kind}Tensor", getattr(torch, f"{_kind}Tensor"))

_ACCELERATOR: dict[str, Any] = {
    **{name: function for name, function in _FUNCTIONS.items() if hasattr(torch.accelerator, name)},
    "current_accelerator": _always(torch.device("cuda")),
    **dict.fromkeys(("current_device_index", "current_device_idx"), lambda: _current),
    **dict.fromkeys(("set_device_index", "set_device_idx"), set_device),
    "device_index": device,
    "empty_host_cache": _nothing,
    "get_memory_info": _FUNCTIONS["mem_get_info"],
    "get_device_capability": _always({}),
}
_take_the_place_of(torch.accelerator, _ACCELERATOR)
_take_the_place_of(torch.cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "mark"), _nothing) | {"range": _block})
_take_the_place_of(torch.cuda.profiler, dict.fromkeys(("start", "stop"), _nothing))
