"""How much of a run each detector has judged, or why nothing can be: silence about what was not looked at is no verdict."""

from __future__ import annotations

import itertools
import re
from collections import Counter

from common.foreign_script.failure import own_lines, short, why_failed
from common.foreign_script.run import Outcome
from ddp.audit.detectors import averages, replicas, weights
from ddp.audit.trace import Trace
from ddp.audit.watch.event_types import (
    Backward,
    Clip,
    Collective,
    CollectiveBegins,
    Compiled,
    Evaluation,
    Forward,
    JoinBegins,
    Save,
    Skipped,
)

# A rank says this when another one has gone, a launcher when one has ended without an error of Python.
LOST = re.compile("gloo/transport|ChildFailedError|ProcessExitedException")
# Detectors of single events: how these are called, and their kind.
OF_EVENTS = {
    "collectives": ("calls", Collective),
    "clipping": ("clippings", Clip),
    "randomness": ("forward passes", Forward),
    "evaluation": ("evaluating lines", Evaluation),
    "checkpoints": ("files", Save),
}


def judged(trace: Trace, outcome: Outcome) -> tuple[str | None, list[str], str]:
    """How much of a run was judged.

    :returns: why none of it can be, or None; a line for each kind of things of which nothing was; and one that names what was, empty if
        nothing was
    """
    if why := _why_unjudged(trace, outcome):
        return why, [], ""
    first, paired, both = trace.ranks[0], list(trace.steps()), len(list(trace.epochs(train=True)))
    kinds = Counter(map(type, first.events))
    closures = ["the optimizer calls its closure" if step.has_closure else "" for step in first.steps]
    alone = (
        "DDP joins uneven ranks" if kinds[JoinBegins] else max(closures, default="") or "other ranks do not take them"
    )
    rest = [alone] * (len(first.steps) - len(paired))
    compiled = ": the model is compiled" if kinds[Compiled] else ""
    training = len(first.training)
    # For each detector why it has not judged a thing; empty if it has.
    things = {
        "averages": ("steps", [*map(averages.why_not, paired), *rest]),
        "weights": ("steps", [why and why + compiled for why in map(weights.why_not, paired)] + rest),
        "replicas": ("steps", [*map(replicas.why_not, paired), *rest]),
        "schedules": ("steps", [""] * len(paired) + rest),
        "optimizers": ("steps", closures),
        "order": ("epochs", [""] * training),
        "coverage": ("epochs", [""] * both + ["other ranks do not have them"] * (training - both)),
        **{name: (what, [""] * kinds[kind]) for name, (what, kind) in OF_EVENTS.items()},
    }
    lines = dict[str, list[str]]()
    for name, (what, reasons) in things.items():
        if reasons and all(reasons):
            lines.setdefault(f"0 of {len(reasons)} {what}, {reasons[0]}", []).append(name)
    seen = [f"{name} {reasons.count('')} {what}" for name, (what, reasons) in things.items() if "" in reasons]
    return None, [f"{', '.join(names)}: {line}" for line, names in lines.items()], ", ".join(seen)


def _why_unjudged(trace: Trace, outcome: Outcome) -> str | None:
    """One line, or None if the run can be judged."""
    if trace.errors:
        return f"the audit itself failed: {trace.errors[0]}"
    if why := why_ended(trace, outcome):
        return why
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


def why_ended(trace: Trace, outcome: Outcome) -> str | None:
    """Why a run ended before the script did; None if it did not."""
    if outcome.status == 0:
        return None
    if outcome.status is None:
        places = "; ".join(map(_place, outcome.stacks))
        return f"the script did not end within {outcome.seconds:.0f} s: {places}{_parting(trace, count_missing=True)}"
    # If no error of the script came first, a rank that has called less did not end by one.
    return why_failed(outcome) + _parting(trace, count_missing=LOST.search(outcome.traceback) is not None)


def _parting(trace: Trace, count_missing: bool) -> str:
    """Where the ranks part: the first collective of all ranks that they do not all call; empty if there is none.

    :param count_missing: whether it counts, too, if a rank has called none there
    """
    for row in itertools.zip_longest(*(rank.all(CollectiveBegins) for rank in trace.ranks)):
        said = dict[str, str]()  # by what is called, the first rank that calls it
        for rank, call in zip(trace.ranks, row, strict=True):
            if call:
                said.setdefault(call.what, f"rank {rank.rank} calls {call.what} at {short(call.where)}")
            elif count_missing:
                said.setdefault("", f"rank {rank.rank} calls none")
        if len(said) > 1:
            return f"; the ranks part: {', '.join(said.values())}"
    return ""


def _place(stack: str) -> str:
    """The innermost lines of the script in a stack that faulthandler wrote, with the rank."""
    rank, *_ = stack.splitlines() or [""]
    return f"rank {rank} is at {', called at '.join([*own_lines(stack)][:3]) or 'an unknown place'}"
