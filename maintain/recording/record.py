"""The recorder inside a process: it runs a scene's script and writes down the lines and calls that it executes.

    python -m maintain.recording.record FOLDER SCENE [ARGUMENT ...]

Each process appends one line per event to a file of its own, at once, so that a killed process leaves all that it did. Times are
those of the machine's monotonic clock, which all processes share.

Python's tracing makes each line some microseconds slower. So the order of what happens is right, and its proportions are roughly so.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import pkgutil
import runpy
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from maintain.recording.scenes import SCENES

CALLS = (
    "torch.distributed.isend",
    "torch.distributed.irecv",
    "torch.distributed.all_reduce",
    "torch.distributed.broadcast",
    "torch.distributed.all_gather_single",
    "torch.distributed.reduce_scatter_single",
    "torch.distributed.init_process_group",
    "torch.distributed.destroy_process_group",
    "torch.distributed.barrier",
    "torch.distributed.TCPStore.set",
    "torch.distributed.TCPStore.get",
    "torch.nn.Module.__call__",
    "torch.autograd.backward",
    "torch.nn.utils.clip_grad_norm_",
    "torch.amp.GradScaler.unscale_",
    "torch.amp.GradScaler.step",
    "torch.amp.GradScaler.update",
    "torch.utils.data.DistributedSampler.set_epoch",
    # HACK: two private names of DataLoader. If torch renames one, nothing can be recorded: AttributeError.
    "torch.utils.data._utils.fetch._MapDatasetFetcher.fetch",
    "torch.utils.data.dataloader._BaseDataLoaderIter.__next__",
    "torch.save",
    "torch.load",
    "os.replace",
    "os.rename",
    "os.fsync",
)
LABELS = {  # for names that say too little
    "__call__": "forward",
    "__next__": "next batch",
    "fetch": "load batch",
    "step": "scaler.step",
    "update": "scaler.update",
    "run": "all-reduce",
    "_sum_part": "add up",
    "_call": "forward of a part",
}


class EventWriter:
    """Writes the events of this process and of the workers that it forks.

    :param folder: of the files, one per process
    :param sources: whose lines are followed; absolute
    """

    def __init__(self, folder: Path, sources: list[str]) -> None:
        self._folder, self._sources = folder, sources
        self._files: dict[int, io.FileIO] = {}
        self._numbers = itertools.count(1)  # threads begin spans, too

    def write(self, lane: str = "", **event: Any) -> None:
        """:param lane: where it is drawn, if not with its thread"""
        pid, thread = os.getpid(), threading.current_thread().name
        if pid not in self._files:
            self._files[pid] = io.FileIO(self._folder / f"{pid}.jsonl", "a")
        lane = lane or ("" if thread == "MainThread" else thread.rpartition("_")[0] or thread)
        event = {"t": time.monotonic_ns() // 1000, "pid": pid, "process": _process(), "lane": lane, **event}
        self._files[pid].write(json.dumps(event).encode() + b"\n")

    def trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        """Python calls this for each function, and then for each line of those whose file is followed."""
        if frame.f_code.co_filename not in self._sources:
            return None
        if event == "line":
            self.write(line=frame.f_lineno, file=self._sources.index(frame.f_code.co_filename))
        return self.trace

    def recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that writes a span and does the same.

        A message and a collective that runs beside the thread have lanes of their own. They end when they have been waited for;
        an all-reduce ends when it is done.
        """
        label = LABELS.get(name, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            lane = "messages" if name in ("isend", "irecv") else "collectives" if kwargs.get("async_op") else ""
            number = next(self._numbers)
            end = functools.partial(self.write, end=number)
            self.write(lane, begin=number, name=label, **_facts(label, args, kwargs))
            value = None
            try:
                value = function(*args, **kwargs)
            finally:
                if not lane:
                    end(note=_result(label, args, value))
            if lane and name == "all_reduce":
                value.get_future().then(lambda _: end())
            elif lane:
                return _Waited(value, end)
            return value

        return call


class _Waited:
    """The handle of a message or collective, whose span ends when it has been waited for: gloo has futures of all-reduces alone."""

    def __init__(self, work: Any, end: Callable[[], None]) -> None:
        self._work, self._end = work, end

    def wait(self) -> None:
        self._work.wait()
        self._end()


def _process() -> str:
    worker = torch.utils.data.get_worker_info()
    rank = f"rank {os.environ['RANK']}" if int(os.environ["WORLD_SIZE"]) > 1 else "process"
    return f"{rank}, worker {worker.id}" if worker else rank


def _facts(label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The bytes of a call, the other rank of a message, and the argument that tells something: sample numbers, a file, a key."""
    value = args[-1] if args else None
    if label == "fsync":
        value = os.readlink(f"/proc/self/fd/{value}")
    note = str(value) if label in ("load batch", "set_epoch") else ""
    if isinstance(value, (str, Path)):
        note = Path(value).name
    nbytes = 0 if label in ("forward", "backward") else _bytes(args)
    return {"note": note, "bytes": nbytes, "peer": kwargs.get("group_dst", kwargs.get("group_src"))}


def _bytes(values: Any) -> int:
    if isinstance(values, Tensor):
        return values.nbytes
    return sum(map(_bytes, values)) if isinstance(values, (list, tuple)) else 0


def _result(label: str, args: tuple[Any, ...], value: Any) -> str:
    """The result of a call, if it is a number."""
    if label == "optimizer step":
        parameters = (one for group in args[0].param_groups for one in group["params"])
        first = next(parameter for parameter in parameters if parameter.grad is not None)
        return f"first gradient {first.grad.flatten()[0]:.4g}, weight {first.flatten()[0]:.4g}"
    if label == "scaler.update":
        return f"to {args[0].get_scale():g}"
    return f"returns {value.item():.4g}" if isinstance(value, Tensor) and value.numel() == 1 else ""


def main() -> None:
    folder, name, *arguments = sys.argv[1:]
    scene = SCENES[name]
    writer = EventWriter(Path(folder), list(map(str, scene.files)))
    for path in (*CALLS, *scene.calls):
        owner, _, name = path.rpartition(".")
        module = pkgutil.resolve_name(owner)
        setattr(module, name, writer.recorded(name, getattr(module, name)))
    # HACK: torch wraps the step of each class of optimizers by this function. Without it, no step is recorded.
    hooked = Optimizer.profile_hook_step  # of each class of optimizers, the step with all of its hooks
    step = staticmethod(lambda step: writer.recorded("optimizer step", hooked(step)))
    Optimizer.profile_hook_step = step  # type: ignore[assignment]
    script = str(scene.files[0])
    sys.argv = [script, *arguments]
    threading.settrace(writer.trace)
    sys.settrace(writer.trace)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
