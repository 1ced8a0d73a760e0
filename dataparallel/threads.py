"""A thread for each device, which runs a call with the modes of the calling thread.

After torch/nn/parallel/parallel_apply.py: the threads start anew in every forward pass. Grad mode, autocast and the current stream belong
to a thread, so they are handed over with the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from dataparallel.devices import current_streams, on_stream

Result = TypeVar("Result")


def run_in_threads(calls: Sequence[Callable[[], Result]], devices: Sequence[torch.device]) -> list[Result]:
    """Run the i-th call in a thread for the i-th device, all at once, with the caller's modes; returns their results.

    :param calls: at most one per device
    :raises Exception: of the first call in their order that failed, after all have ended; its message begins with the replica's
        number and its device
    """
    modes = _modes_of_this_thread(devices[0].type)

    def run(call: Callable[[], Result], stream: torch.cuda.Stream | None) -> Result:
        with modes(), on_stream(stream):
            return call()

    with ThreadPoolExecutor(len(calls), "replica") as threads:  # its end waits for all calls
        running = [
            threads.submit(run, call, stream) for call, stream in zip(calls, current_streams(devices), strict=False)
        ]
    results = []
    for number, ended in enumerate(running):
        try:
            results.append(ended.result())
        except Exception as error:
            error.args = (f"replica {number} on {devices[number]}: {error}",)
            raise
    return results


def _modes_of_this_thread(kind: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """The calling thread's modes, for another thread."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        autocast = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cache)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), autocast:
            yield

    return modes


@contextlib.contextmanager
def divided_cores(devices: Sequence[torch.device]) -> Iterator[None]:
    """Within the block, the calling thread and those that it starts have one CPU device's share of the intra-op threads.

    A new thread begins with the number that was set last, in whichever thread. The calling thread needs its share, too:
    OpenMP's threads spin for some milliseconds while they wait for more work, on the cores that the replicas' threads want.
    """
    before = torch.get_num_threads()
    if devices[0].type == "cpu":
        torch.set_num_threads(max(1, before // len(devices)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
