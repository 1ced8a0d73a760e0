"""Why a run cannot be judged: the script failed, hangs, or did nothing that could be."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from common.foreign_script.run import Outcome
from ddp.audit.trace import Trace
from ddp.audit.watch.event_types import Backward

# Packages whose kernels run on GPUs alone.
OF_GPUS = ("apex", "bitsandbytes", "deep_ep", "flash_attn", "transformer_engine", "triton", "xformers")
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def why_unjudged(trace: Trace, outcome: Outcome) -> str | None:
    """One line, or None if the run can be judged."""
    if trace.errors:
        return f"the audit itself failed: {trace.errors[0]}"
    if outcome.status is None:
        return f"the script did not end within {outcome.seconds:.0f} s: {'; '.join(map(_innermost, outcome.stacks))}"
    if outcome.status:
        return why_failed(outcome)
    if not trace.ranks:
        return "the script never made a process group: it calls no init_process_group"
    if trace.world_size < 2:
        return "the script ran on one rank: most of what can be wrong needs two, so give --ranks 2"
    if not any(rank.steps for rank in trace.ranks):
        passes = sum(len(rank.all(Backward)) for rank in trace.ranks)
        return f"the script took no optimizer step of torch.optim ({passes} backward passes were seen)"
    return None


def why_failed(outcome: Outcome) -> str:
    """The error that ended a script, and its line."""
    lines = outcome.traceback.splitlines()
    error = next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)), "")
    if not error or "ChildFailedError" in error:
        return f"the script failed with exit status {outcome.status}; its own output is above"
    place = (list(_own_lines(outcome.traceback)) or ["an unknown place"])[-1]
    package = re.search(r"No module named '(\w+)", error)
    if package and package[1] in OF_GPUS:
        return f"the script needs kernels of a GPU: {place} imports {package[1]}"
    if package:
        return f"the script needs a package that is missing: {place} imports {package[1]}"
    if error.startswith("FileNotFoundError"):
        return f"the script needs a file that is not there: {place}: {error}"
    if error.startswith("MemoryError") or "can't allocate memory" in error or "out of memory" in error:
        return f"the script needs more memory than there is: {place}: {error}"
    return f"the script failed: {place}: {error}"


def _innermost(stack: str) -> str:
    """The line of the script in a stack that faulthandler wrote, with the rank."""
    rank, *_ = stack.splitlines() or [""]
    return f"rank {rank} is at {next(_own_lines(stack), 'an unknown place')}"


def _own_lines(stack: str) -> Iterator[str]:
    """``file:line`` of each frame that is in no library, in the order of a stack or a traceback."""
    for frame in FRAME.finditer(stack):
        file = frame["file"]
        if not re.search(
            r"site-packages|dist-packages|/lib/python3|^<|/common/foreign_script/|/ddp/audit/(gpu|watch)/", file
        ):
            yield f"{file.removeprefix(os.getcwd() + os.sep)}:{frame['line']}"
