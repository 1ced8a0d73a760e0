"""The answer to a log, and the advice that comes with it."""

from __future__ import annotations

from dataclasses import dataclass

from ddp.launch.frames import Frame
from ddp.launch.ranks import listed

RECORD = "put @torch.distributed.elastic.multiprocessing.errors.record over main(), so that torchrun's report has the traceback"
LOGS = "start with torchrun --log-dir logs --tee 3, and give doctor --explain that folder: each rank has its own file there"
FAULTHANDLER = "set PYTHONFAULTHANDLER=1, which prints the line of Python where a signal ends it"
STACKS = "run py-spy dump --pid PID on each rank while it hangs"
DETAIL = "set TORCH_DISTRIBUTED_DEBUG=DETAIL for one run: it compares each collective of the ranks before it starts"
RECORDER = "set TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1: the dumps say where each rank was"
BLOCKING = "set CUDA_LAUNCH_BLOCKING=1: CUDA reports such errors late, and the line is only where it was noticed"


@dataclass(frozen=True)
class Verdict:
    """The first failure.

    :ivar cause: the exception, the exit code, or words
    :ivar ranks: that failed first, or that the others waited for; empty if the log does not tell
    :ivar place: the user's line
    :ivar certain: whether the log leaves no doubt about it
    :ivar advice: how to get what the log does not have
    :ivar message: to look up in symptoms.md; the cause if it is empty
    """

    cause: str
    ranks: tuple[int, ...] = ()
    place: Frame | None = None
    certain: bool = True
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    message: str = ""

    def __str__(self) -> str:
        named = not self.ranks or self.cause.startswith("rank")
        return self.cause if named else f"{listed(self.ranks)}: {self.cause}"
