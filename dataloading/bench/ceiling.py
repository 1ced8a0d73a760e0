"""The upper limit of loading on this machine: the fastest installed decoder alone, on all usable cores at once.

It decodes from memory into a buffer that is reused: no files, no batches, no consumer.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from common.errors import UsageError
from dataloading.dataset.decoders import decode_pillow, get_decoder
from dataloading.loader.worker_pool import PARENT_CHECK_S


class Ceiling:
    """A process per core that decodes on request; a call returns the seconds of the slowest process.

    :param images: JPEG files; each call decodes each of them once
    :param decoder: one of ``dataloading.dataset.decoders.DECODERS``
    :param cores: number of processes
    """

    def __init__(self, images: Sequence[bytes], decoder: str, cores: int) -> None:
        context: Any = multiprocessing.get_context()
        self._workers: list[tuple[Any, Any]] = []
        for core in range(cores):
            ours, theirs = context.Pipe()
            process = context.Process(target=_decode, args=(theirs, images[core::cores], decoder), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def __call__(self) -> float:
        try:
            for _, pipe in self._workers:
                pipe.send(True)
            return float(max(pipe.recv() for _, pipe in self._workers))
        except (EOFError, OSError) as error:
            raise UsageError(
                "a process that measures the ceiling died: it may have been killed for its memory"
            ) from error

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.join()
            process.close()
            pipe.close()


def _decode(pipe: Connection, images: Sequence[bytes], decoder: str) -> None:
    """The main loop of a process. It checks for its parent, since sibling processes also hold the parent's pipe open."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    decode = get_decoder(decoder)
    out = np.empty_like(decode_pillow(images[0])) if images else np.empty(0, np.uint8)
    while os.getppid() == parent:
        if pipe.poll(PARENT_CHECK_S):
            pipe.recv()
            began = time.perf_counter()
            for data in images:
                decode(data, out)
            pipe.send(time.perf_counter() - began)
