"""The same job again: on other numbers of ranks, with more micro-steps, killed and resumed, or as it was. It must come to the same result.

The second run of each audit is on one rank, whose batches are as large as those of all ranks together. They are put in from outside
(watch/enlarge.py), without a flag of the script.
"""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from common.errors import UsageError
from ddp.audit.compare import Verdict, same_bits, same_numbers, same_rest
from ddp.audit.detectors import weights
from ddp.audit.finding import Finding
from ddp.audit.trace import Trace
from ddp.audit.watch.event_types import Save

KINDS = ("repeat", "ranks", "micro-steps", "resume")
RUN = "{run}"  # in the script's arguments: a folder of the run


@dataclass(frozen=True)
class Plan:
    """A run of the script that is compared with the first one.

    :ivar kind: one of ``KINDS``, or ``"third"``, see :func:`third`
    :ivar compare: gets both traces
    :ivar is_asked: whether the user wants it; if not, the script need not allow it
    :ivar batches: the factor, and for each line that makes a loader, the sizes of its batches that grow by it; as JSON
    :ivar killed: what is run before it in the same folder, and killed, if anything
    :ivar kill_at: after which optimizer step of the first run; None if there is no such step
    """

    kind: str
    what: str
    script: Sequence[str]
    ranks: int
    compare: Callable[[Trace, Trace], Verdict]
    is_asked: bool = True
    batches: str = ""
    killed: Sequence[str] | None = None
    kill_at: Callable[[Trace], int | None] = lambda base: max(1, 2 * len(base.ranks[0].steps) // 3)


class Variation(NamedTuple):
    """The result of one run, and what is wrong with it.

    :ivar verdict: None if nothing was compared
    :ivar other: its trace
    """

    plan: Plan
    what: str
    text: str
    finding: Finding | None = None
    verdict: Verdict | None = None
    other: Trace | None = None

    @property
    def is_judged(self) -> bool:
        return self.verdict is not None

    def as_json(self) -> dict[str, object]:
        return {"what": self.what, "text": self.text, "is_right": self.is_judged and self.finding is None}


Runner = Callable[[Path, Sequence[str], int, int | None, str], Trace]


def plan(
    kinds: Sequence[str],
    script: Sequence[str],
    ranks: int,
    batch_flag: str | None,
    accumulation_flag: str | None,
    resume_flag: str | None,
) -> list[Plan]:
    """The runs that the user asks for. The flags are those of the script, and None where it has none.

    :param batch_flag: samples of a rank and micro-step
    :param accumulation_flag: micro-steps of an optimizer step
    :param resume_flag: a switch with which the script is started again
    :raises UsageError: if something cannot be varied with this script's arguments
    """
    plans = []
    if "repeat" in kinds:
        plans.append(Plan("repeat", "run again", script, ranks, same_bits))
    if "ranks" in kinds:
        for other in (ranks - 1, ranks + 1):
            changed = _changed(script, batch_flag, ranks, other)
            plans.append(Plan("ranks", f"on {other} rank{'s' * (other > 1)}", changed, other, same_numbers))
    if "micro-steps" in kinds:
        if not accumulation_flag:
            raise UsageError(
                "--vary micro-steps needs --accumulation-flag: the name of the script's flag for its micro-steps"
            )
        changed = _changed(_changed(script, accumulation_flag, 2, 1), batch_flag, 1, 2)
        plans.append(Plan("micro-steps", "with twice as many micro-steps", changed, ranks, same_numbers))
    if "resume" in kinds:
        if not any(RUN in argument for argument in script):
            raise UsageError(
                f"--vary resume needs {RUN} among the script's arguments: it stands for a folder of the run, with its checkpoints"
            )
        again = [*script, *([f"--{resume_flag.lstrip('-')}"] if resume_flag else [])]
        killed = Plan("resume", "killed and started again", again, ranks, same_rest, killed=script)
        plans += [killed, replace(killed, kill_at=_after_epoch, is_asked=False)]
    return plans


def second(script: Sequence[str], ranks: int, batch_flag: str | None, base: Trace) -> Plan:
    """The run on one rank with batches as large as those of all ranks together.

    :param batch_flag: as for :func:`plan`
    :raises UsageError: if these batches cannot be put in
    """
    loaders = [epoch.begin for epoch in base.ranks[0].training]
    sizes = dict[str, set[int | None]]()
    if batch_flag:
        script = _changed(script, batch_flag, ranks, 1)
    elif not loaders:
        raise UsageError(
            "the script trains on no DataLoader, whose batches could grow; --batch-flag names a flag for those of a rank"
        )
    else:
        own = [one for one in loaders if one.batch_size is None]
        if own:
            file, _, line = own[0].where.rpartition(":")
            raise UsageError(
                f"line {line} of {Path(file).name} has batches of its own; --batch-flag names a flag for those of a rank"
            )
        # Where each rank evaluates all samples, one rank has the same batches of them.
        divided = [one.begin for one, two, *_ in base.epochs(train=False) if one.rows != two.rows]
        for one in (*loaders, *divided):
            if one in loaders or (one.batch_size or 1) > 1:  # an evaluation's samples may differ in size, one by one
                sizes.setdefault(one.where, set()).add(one.batch_size)
    return Plan(
        "ranks",
        f"on 1 rank with the batches of {ranks}",
        script,
        1,
        functools.partial(same_numbers, is_asked=False),
        is_asked=False,
        batches=json.dumps([ranks, {where: sorted(some, key=str) for where, some in sizes.items()}]),
    )


def third(script: Sequence[str], ranks: int, finding: Finding) -> Plan:
    """The run on one rank more, which tells a loss that is divided by the ranks from one that has a coefficient."""

    def compare(base: Trace, other: Trace) -> Verdict:
        if any((one.name, one.where) == (finding.name, finding.where) for one in weights.detect(other)):
            return Verdict(f"the weights of all terms sum to 1 / {ranks + 1} there", finding.cure, None, numbers=False)
        return Verdict("the weights of all terms have another sum, which is a coefficient", numbers=True)

    return Plan("third", f"on {ranks + 1} ranks", script, ranks + 1, compare, is_asked=False)


def _after_epoch(base: Trace) -> int | None:
    """In the first step after an epoch, so that the latest checkpoint may be that of an epoch's last batch."""
    begins = [epoch.begin.step for epoch in base.ranks[0].training]
    ends = [after for before, after in itertools.pairwise(begins) if after > before]
    return ends[0] + 1 if ends else None


def _changed(script: Sequence[str], name: str | None, factor: int, divisor: int) -> list[str]:
    """The arguments with the value of one flag multiplied and divided.

    :raises UsageError: if it is not among them as ``--NAME N`` or ``--NAME=N``, or cannot be divided
    """
    changed = list(script)
    if not name:
        return changed
    name = name.lstrip("-")
    for at, argument in enumerate(script):
        flag, equals, was = argument.partition("=")
        if flag == f"--{name}" and not equals:
            at, was = at + 1, script[at + 1] if at + 1 < len(script) else ""
        if flag == f"--{name}" and was.isdecimal():
            value, rest = divmod(int(was) * factor, divisor)
            if rest:
                raise UsageError(f"--{name} {was} cannot be varied: {int(was) * factor} is no multiple of {divisor}")
            changed[at] = f"{flag}={value}" if equals else str(value)
            return changed
    raise UsageError(f"there is no --{name} with a whole number among the script's arguments, which could be changed")


def vary(plan: Plan, base: Trace, run: Runner) -> Variation:
    """Run the script again in another way.

    :param base: the script as it is
    :param run: runs, with a folder for ``{run}``, arguments on ranks, up to an optimizer step at which they are killed, with such batches
    """
    kill_at, what = plan.kill_at(base), plan.what
    if plan.killed and kill_at is None:
        return Variation(plan, what, "not done, since there is one epoch")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            if plan.killed:
                what += f", after {kill_at} steps"
                killed = run(folder, plan.killed, plan.ranks, kill_at, "")
                # A script that never saves is compared, since it begins anew.
                if any(rank.all(Save) for rank in base.ranks) and not any(rank.all(Save) for rank in killed.ranks):
                    return Variation(plan, what, "no checkpoint was saved by then")
            other = run(folder, plan.script, plan.ranks, None, plan.batches)
            if other.world_size != plan.ranks:
                made = f"a group of {other.world_size} ranks" if other.world_size else "no process group there"
                raise UsageError(f"the script made {made}")
            verdict = plan.compare(base, other)
            text = f"{what}: {verdict.text}"
            finding = Finding(f"vary-{plan.kind}", verdict.at, text, cure=verdict.cure) if verdict.at else None
            return Variation(plan, what, verdict.text, finding, verdict, other)
        except UsageError as error:
            return Variation(plan, what, f"not compared: {error}")
