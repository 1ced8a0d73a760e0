"""Why a run cannot be judged: the script failed, hangs, or did nothing that could be."""

from __future__ import annotations

from common.foreign_script.failure import own_lines, why_failed
from common.foreign_script.run import Outcome
from ddp.audit.trace import Trace
from ddp.audit.watch.event_types import Backward, Skipped


def why_unjudged(trace: Trace, outcome: Outcome) -> str | None:
    """One line, or None if the run can be judged."""
    if trace.errors:
        return f"the audit itself failed: {trace.errors[0]}"
    if outcome.status is None:
        return f"the script did not end within {outcome.seconds:.0f} s: {'; '.join(map(_innermost, outcome.stacks))}"
    if outcome.status:
        return why_failed(outcome)
    if not trace.ranks:
        return (
            "no process group was seen: the script calls no init_process_group, or it starts Python in a way that leaves the watch out "
            "(with -I, -E or -S, or another PYTHONPATH)"
        )
    if trace.world_size < 2:
        return "the script ran on one rank: most of what can be wrong needs two, so give --ranks 2"
    if any(rank.steps for rank in trace.ranks):
        return None
    if skipped := max(len(rank.all(Skipped)) for rank in trace.ranks):
        return f"the script took no optimizer step: its scaler skipped all {skipped}, since gradients were inf or nan"
    passes = sum(len(rank.all(Backward)) for rank in trace.ranks)
    return f"the script took no optimizer step of torch.optim ({passes} backward passes were seen)"


def _innermost(stack: str) -> str:
    """The line of the script in a stack that faulthandler wrote, with the rank."""
    rank, *_ = stack.splitlines() or [""]
    return f"rank {rank} is at {next(own_lines(stack), 'an unknown place')}"
