"""The recorder inside a process: it runs a script and writes down the lines and calls that it executes.

    python -m common.recording.record FOLDER SOURCES CALLS SCRIPT [ARGUMENT ...]

``SOURCES`` are files whose lines are followed, and ``CALLS`` more functions to record, as ``module:name``; both separated by commas.
Each process appends one line per event to a file of its own, at once, so that a killed process leaves all that it did. Times are
those of the machine's monotonic clock, which all processes share.

Python's tracing makes each line some microseconds slower. So the order of what happens is right, and its proportions are roughly so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

COLLECTIVES = ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single")
MESSAGES = ("isend", "irecv")
CALLS = {
    "torch.distributed": ("init_process_group", "destroy_process_group", "barrier"),
    "torch.nn.utils": ("clip_grad_norm_",),
    "torch": ("save", "load"),
    "os": ("replace", "rename", "fsync"),
    "torch.distributed:TCPStore": ("set", "get"),
    "torch.amp:GradScaler": ("unscale_", "step", "update"),
    "torch.utils.data:DistributedSampler": ("set_epoch",),
    "torch.utils.data._utils.fetch:_MapDatasetFetcher": ("fetch",),
    "torch.utils.data.dataloader:_BaseDataLoaderIter": ("__next__",),
}
NAMES = {  # for those that say too little
    "__next__": "next batch",
    "fetch": "load batch",
    "step": "scaler.step",
    "update": "scaler.update",
    "run": "all-reduce",
    "_sum_part": "add up",
    "_call": "forward of a part",
}


class Recorder:
    """Writes the events of this process and of the workers that it forks.

    :param folder: of the files, one per process
    :param sources: whose lines are followed; absolute
    """

    def __init__(self, folder: Path, sources: list[str]) -> None:
        self._folder, self._sources = folder, sources
        self._files: dict[int, int] = {}
        self._numbers = itertools.count(1)

    def write(self, **event: Any) -> None:
        pid = os.getpid()
        if pid not in self._files:
            self._files[pid] = os.open(self._folder / f"{pid}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        event = {
            "t": time.monotonic_ns(),
            "pid": pid,
            "process": _process(),
            "thread": threading.current_thread().name,
            **event,
        }
        os.write(self._files[pid], json.dumps(event).encode() + b"\n")

    def begin(self, name: str, **facts: Any) -> int:
        """Begin a span, and return its number.

        :param facts: ``note``, ``bytes``, ``to`` and ``source`` of a message, ``lane`` if it is not the thread's
        """
        number = next(self._numbers)  # threads begin spans, too
        self.write(begin=number, name=name, **facts)
        return number

    def end(self, number: int, **facts: Any) -> None:
        self.write(end=number, **facts)

    @contextlib.contextmanager
    def span(self, name: str, **facts: Any) -> Iterator[dict[str, Any]]:
        number = self.begin(name, **facts)
        results: dict[str, Any] = {}
        try:
            yield results
        finally:
            self.end(number, **results)

    def trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        """Python calls this for each function, and what it returns for each line of it."""
        return self._line if frame.f_code.co_filename in self._sources else None

    def _line(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if event == "line":
            self.write(line=frame.f_lineno, file=self._sources.index(frame.f_code.co_filename))
        return self._line

    def watch(self, owner: Any, name: str) -> None:
        """Replace a function by one that records a span and does the same."""
        original = getattr(owner, name)
        label = NAMES.get(name, name)

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self.span(label, note=_note(name, args), bytes=_bytes(args)) as results:
                value = original(*args, **kwargs)
                if isinstance(value, Tensor) and value.numel() == 1:
                    results["note"] = f"returns {value.item():.4g}"
                elif name == "update":  # of a GradScaler
                    results["note"] = f"to {args[0].get_scale():g}"
                return value

        setattr(owner, name, recorded)

    def watch_collective(self, name: str) -> None:
        """As :meth:`watch`. One that runs beside the thread gets a lane of its own, and ends when its future does."""
        original = getattr(dist, name)

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            facts = {"bytes": _bytes(args), **_peers(name, kwargs)}
            if not (kwargs.get("async_op") or name in MESSAGES):
                with self.span(name, **facts):
                    return original(*args, **kwargs)
            number = self.begin(name, lane="messages" if name in MESSAGES else "collectives", **facts)
            work = original(*args, **kwargs)
            if name != "all_reduce":  # gloo's others have no future
                return _Waited(work, functools.partial(self.end, number))

            def end(done: torch.futures.Future[Any]) -> None:
                self.end(number)
                done.wait()  # raises the error of a failed one

            work.get_future().then(end)
            return work

        setattr(dist, name, recorded)

    def watch_training(self) -> None:
        """Forward and backward passes, and steps of optimizers with the first weight that they leave behind."""
        forward, backward, depth = nn.Module.__call__, torch.autograd.backward, threading.local()

        def recorded_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(depth, "value", 0):
                return forward(module, *args, **kwargs)
            depth.value = 1
            try:
                with self.span("forward"):
                    return forward(module, *args, **kwargs)
            finally:
                depth.value = 0

        def recorded_backward(*args: Any, **kwargs: Any) -> None:
            with self.span("backward"):
                backward(*args, **kwargs)

        begun: list[int] = []
        ends: list[RemovableHandle] = []

        def before_step(*_: object) -> None:
            begun.append(self.begin("optimizer step"))
            if ends:
                ends.pop().remove()
            # As the last of all hooks: another may gather the new weights.
            ends.append(register_optimizer_step_post_hook(after_step))

        def after_step(optimizer: Optimizer, *_: object) -> None:
            parameters: Iterator[Tensor] = (one for group in optimizer.param_groups for one in group["params"])
            first = next(parameter for parameter in parameters if parameter.grad is not None)
            gradient, weight = first.grad.flatten()[0].item(), first.flatten()[0].item()  # type: ignore[union-attr]
            self.end(begun.pop(), note=f"first gradient {gradient:.4g}, weight {weight:.4g}")

        nn.Module.__call__ = recorded_forward  # type: ignore[method-assign]
        torch.autograd.backward = recorded_backward
        register_optimizer_step_pre_hook(before_step)


class _Waited:
    """The handle of a message or collective, whose span ends when it has been waited for."""

    def __init__(self, work: Any, end: Callable[[], None]) -> None:
        self._work, self._end = work, end

    def wait(self) -> None:
        self._work.wait()
        self._end()


def _process() -> str:
    worker = torch.utils.data.get_worker_info()
    rank = f"rank {os.environ['RANK']}" if int(os.environ["WORLD_SIZE"]) > 1 else "process"
    return f"{rank}, worker {worker.id}" if worker else rank


def _bytes(values: Any) -> int:
    if isinstance(values, Tensor):
        return values.nbytes
    return sum(map(_bytes, values)) if isinstance(values, (list, tuple)) else 0


def _peers(name: str, kwargs: dict[str, Any]) -> dict[str, int]:
    """The rank to which a message goes, or from which it comes."""
    return {"isend": {"to": kwargs.get("group_dst", 0)}, "irecv": {"source": kwargs.get("group_src", 0)}}.get(name, {})


def _note(name: str, args: tuple[Any, ...]) -> str:
    """The arguments that tell something: sample numbers, an epoch, a file, a key."""
    value = args[-1] if args else None
    if name == "fsync":
        value = os.readlink(f"/proc/self/fd/{value}")
    if isinstance(value, (str, Path)):
        return Path(value).name
    return str(value) if isinstance(value, int) or (isinstance(value, list) and isinstance(value[0], int)) else ""


def main() -> None:
    folder, sources, calls, script, *arguments = sys.argv[1:]
    recorder = Recorder(Path(folder), sources.split(","))
    for name in (*COLLECTIVES, *MESSAGES):
        if hasattr(dist, name):  # some are new in torch 2.14
            recorder.watch_collective(name)
    for owner, names in CALLS.items():
        for name in names:
            recorder.watch(_find(owner), name)
    for call in filter(None, calls.split(",")):
        owner, _, name = call.replace(":", ".:").rpartition(".")
        recorder.watch(_find(owner.replace(".:", ":")), name.lstrip(":"))
    recorder.watch_training()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    threading.settrace(recorder.trace)
    sys.settrace(recorder.trace)
    runpy.run_path(script, run_name="__main__")


def _find(name: str) -> Any:
    """The module, or the class in it, of ``module`` or ``module:class``."""
    module, _, inner = name.partition(":")
    return getattr(importlib.import_module(module), inner) if inner else importlib.import_module(module)


if __name__ == "__main__":
    main()
