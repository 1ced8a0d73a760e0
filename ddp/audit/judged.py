"""How much of a run each detector has judged: silence about what was not looked at is no verdict."""

from __future__ import annotations

from collections import Counter

from ddp.audit.detectors import averages, replicas, weights
from ddp.audit.trace import Trace, epochs

# Detectors of single events: how these are called, and their kind.
OF_EVENTS = {
    "collectives": ("calls", "Collective"),
    "clipping": ("clippings", "Clip"),
    "randomness": ("forward passes", "Forward"),
    "evaluation": ("evaluations", "Evaluation"),
    "checkpoints": ("files", "Save"),
    "costs": ("loaders", "LoaderBegins"),
}


def judged(trace: Trace) -> tuple[list[str], str]:
    """A line for each kind of things of which nothing was judged; and one that names what was, empty if nothing was."""
    first, paired, both = trace.ranks[0], list(trace.steps()), len(list(trace.epochs(train=True)))
    kinds = Counter(type(event).__name__ for event in first.events)
    closures = ["the optimizer calls its closure" if step.has_closure else "" for step in first.steps]
    alone = (
        "DDP joins uneven ranks" if kinds["JoinBegins"] else max(closures, default="") or "other ranks do not take them"
    )
    rest = [alone] * (len(first.steps) - len(paired))
    compiled = ": the model is compiled" if kinds["Compiled"] else ""
    training = sum(epoch.trains for epoch in epochs(first))
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
    return [f"{', '.join(names)}: {line}" for line, names in lines.items()], ", ".join(seen)
