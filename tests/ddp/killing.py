"""Jobs that lose a rank: what the others say of it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

from common.standing_ranks import rendezvous
from tests.launch import NO_GPUS, _context, _rank


def run_with_victim(
    function: Callable[..., Any], world_size: int, victim: int, *arguments: Any, timeout_s: float = 60.0
) -> dict[int, Any]:
    """Call ``function(victim, *arguments)`` on every rank of a new job; what each but the victim returned, by rank.

    :param function: importable by name; on the victim it ends or stops its own process. All are killed afterwards.
    :raises AssertionError: with a survivor's traceback if one failed, or naming the first that did not answer in time
    """
    deadline = time.monotonic() + timeout_s
    pipes, processes = [], []
    with rendezvous(world_size) as environments:
        for environment in environments:
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank, args=(sender, environment | NO_GPUS, function, (victim, *arguments))
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            results = {}
            for rank, pipe in enumerate(pipes):
                if rank != victim:
                    assert pipe.poll(deadline - time.monotonic()), f"rank {rank} did not end within {timeout_s} s"
                    failure, results[rank] = pickle.loads(pipe.recv_bytes())
                    assert failure is None, f"rank {rank} failed:\n{failure}"
            return results
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                process.kill()
                process.join()
                pipe.close()
