"""The same job again: on other numbers of ranks, with more micro-steps, killed and resumed, or as it was. It must come to the same result.

With the same initial weights and global batches, a run on other ranks adds the same terms in another order. So its first gradients may
differ by rounding: relative to what each rank computes, by ``eps * sqrt(n)`` for n terms (the standard deviation of a sum's rounding
errors; Higham and Mary, SIAM J. Sci. Comput. 2019), and by the eps of autocast's dtype, times ``SAFETY``. Rounding errors grow from step
to step, so later steps are compared less closely, and not at all under autocast. A repeated or resumed run must have the same bits.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import UsageError
from ddp.audit.detectors.averages import unscaled
from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import RankTrace, Step, Trace, epochs
from ddp.audit.watch.event_types import Autocast, Backward, Batch, Forward, Loss

KINDS = ("repeat", "ranks", "micro-steps", "resume")
SAFETY = 16.0
EPS = 2.0**-23  # of float32
LATER = 1e-2  # for the steps after the first
WEIGHTS = (
    27.5  # the norm of a probe's weights (watch/tensors.py): no probe is larger than this times its elements' norm
)
RUN = "{run}"  # in the script's arguments: a folder of the run

Runner = Callable[[Path, Sequence[str], int, int | None], Trace]


class Variation(NamedTuple):
    """The result of one run, and what is wrong with it.

    :ivar is_judged: whether the script ran
    """

    what: str
    text: str
    finding: Finding | None = None
    is_judged: bool = True

    def as_json(self) -> dict[str, object]:
        return {"what": self.what, "text": self.text, "is_right": self.is_judged and self.finding is None}


class Verdict(NamedTuple):
    """The result of a comparison of two runs.

    :ivar cure: of what is wrong
    :ivar step: the one that is wrong, if any
    """

    text: str
    cure: str = ""
    step: Step | None = None


class Plan(NamedTuple):
    """A run of the script that is compared with the first one.

    :ivar kind: one of ``KINDS``
    :ivar compare: gets both traces
    :ivar killed: what is run before it in the same folder, and killed after two thirds of the steps, if anything
    """

    kind: str
    what: str
    script: Sequence[str]
    ranks: int
    compare: Callable[[Trace, Trace], Verdict]
    killed: Sequence[str] | None = None


def plan(
    kinds: Sequence[str],
    script: Sequence[str],
    ranks: int,
    batch_flag: str | None,
    accumulation_flag: str | None,
    resume_flag: str | None,
) -> list[Plan]:
    """The script to run. The flags are those of the script, without dashes, and None where it has none.

    :param batch_flag: samples of a rank and micro-step
    :param accumulation_flag: micro-steps of an optimizer step
    :param resume_flag: a switch with which the script is started again
    :raises UsageError: if something cannot be varied with this script's arguments
    """
    plans = []
    if "repeat" in kinds:
        plans.append(Plan("repeat", "run again", script, ranks, _same_bits))
    if "ranks" in kinds:
        for other in (ranks - 1, ranks + 1):
            changed = _changed(script, batch_flag, ranks, other)
            plans.append(Plan("ranks", f"on {other} rank{'s' * (other > 1)}", changed, other, _same_numbers))
    if "micro-steps" in kinds:
        if not accumulation_flag:
            raise UsageError(
                "--vary micro-steps needs --accumulation-flag: the name of the script's flag for its micro-steps"
            )
        changed = _changed(_changed(script, accumulation_flag, 2, 1), batch_flag, 1, 2)
        plans.append(Plan("micro-steps", "with twice as many micro-steps", changed, ranks, _same_numbers))
    if "resume" in kinds:
        if not any(RUN in argument for argument in script):
            raise UsageError(
                f"--vary resume needs {RUN} among the script's arguments: it stands for a folder of the run, with its checkpoints"
            )
        again = [f"--{resume_flag}"] if resume_flag else []
        plans.append(Plan("resume", "killed and started again", [*script, *again], ranks, _same_rest, killed=script))
    return plans


def _changed(script: Sequence[str], name: str | None, factor: int, divisor: int) -> list[str]:
    """The arguments with the value of one flag multiplied and divided.

    :raises UsageError: if it is not among them as ``--NAME N`` or ``--NAME=N``, or cannot be divided
    """
    changed = list(script)
    if not name:
        return changed
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
    raise UsageError(f"--vary needs a --{name} with a whole number among the script's arguments, to change it")


def vary(plans: Sequence[Plan], base: Trace, run: Runner) -> Iterator[Variation]:
    """Run the script again, each time in another way.

    :param base: the script as it is
    :param run: runs, with a folder for ``{run}``, arguments on ranks, up to an optimizer step at which they are killed
    """
    for kind, what, script, ranks, compare, killed in plans:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                if killed:
                    kill_at = max(1, 2 * len(base.ranks[0].steps) // 3)
                    what += f", after {kill_at} steps"
                    run(folder, killed, ranks, kill_at)
                other = run(folder, script, ranks, None)
                if other.world_size != ranks:
                    raise UsageError(f"the script made a group of {other.world_size} ranks")
                text, cure, step = compare(base, other)
                finding = Finding(f"vary-{kind}", step.before, f"{what}: {text}", cure=cure) if step else None
                yield Variation(what, text, finding)
            except UsageError as error:
                yield Variation(what, f"not compared: {error}", is_judged=False)


def _same_rest(base: Trace, resumed: Trace) -> Verdict:
    """Compare a run that was started again with what was left of the first one."""
    steps, again = base.ranks[0].steps, resumed.ranks[0].steps
    if not again:
        return Verdict("nothing was left to do")
    first = again[0].before.parameters
    start = next((i for i, step in enumerate(steps) if step.before.parameters == first), None)
    if start is None:
        return Verdict("it goes on with weights that the undisturbed run never has before a step", LOAD, again[0])
    if start == 0:
        return Verdict("it begins anew, with the initial weights", LOAD, again[0])
    return _same_bits(base, resumed, start)


LOAD = "Save the weights after a step, before the run is killed, and load them at the start"
SEED = "Seed what is drawn: weights, orders, augmentation, dropout"
POSITION = "Save the number of the epoch, and the position in it, and set the sampler to them after a resume"
DIVIDE = "Let the ranks divide each global batch, without padding; --batch-flag is for a batch size of one rank"
RATES = "With the same global batches, the rate must not depend on the number of ranks"
AVERAGE = "Weigh each sample by 1 / the global batch, whatever the number of ranks and micro-steps"
# Values that have the same bits in each optimizer step, what is said of another value, and its cure after a resume.
BITS: tuple[tuple[Callable[[Step], object], str, str], ...] = (
    (lambda step: step.before.parameters, "begins with other weights", LOAD),
    (
        lambda step: step.before.rates,
        "uses another learning rate",
        "Save and load the schedule's state, and the optimizer's",
    ),
    (lambda step: step.before.gradients, "has other gradients", "Restore the generators, and BatchNorm's statistics"),
    (lambda step: step.after.parameters, "ends with other weights", "Save and load the optimizer's state"),
)


def _same_bits(base: Trace, other: Trace, start: int = 0) -> Verdict:
    """Compare a run with the steps of the first from one on."""
    for rank, repeated in zip(base.ranks, other.ranks, strict=False):
        for step, again in zip(rank.steps[start:], repeated.steps, strict=False):
            at = f"step {step.number} of rank {rank.rank}"
            rows = _rows(repeated, again)
            if _rows(rank, step) != rows:
                same = [f"the samples of step {one.number}" for one in rank.steps if _rows(rank, one) == rows]
                return Verdict(f"{at} takes {[*same, 'other samples'][0]}", POSITION if start else SEED, step)
            for value, text, cure in BITS:
                if value(step) != value(again):
                    return Verdict(f"{at} {text}", cure if start else SEED, step)
    expected, got = len(base.ranks[0].steps) - start, len(other.ranks[0].steps)
    if expected != got:
        return Verdict(f"it takes {got} steps where {expected} are left", POSITION, base.ranks[0].steps[-1])
    since = f" (from step {start} on)" if start else ""
    return Verdict(f"the same samples and the same bits in {got} steps{since}")


def _same_numbers(base: Trace, other: Trace) -> Verdict:
    """Compare runs that divide the global batches differently.

    :raises UsageError: if one has no step that all ranks took
    """
    ours, theirs = list(base.steps()), list(other.steps())
    if not (ours and theirs):
        raise UsageError("under join, and with an optimizer that calls a closure, there are no global steps to compare")
    unknown = next((f"{event.layer} differs by design" for event in ours[0][0].all(Forward) if event.layer), "")
    autocast = max((float(event.eps) for event in base.ranks[0].all(Autocast)), default=0.0)
    terms = sum(event.terms for step in ours[0] for event in step.all(Loss))
    first = SAFETY * (autocast + EPS * math.sqrt(terms or 1))
    largest = 0.0
    for number, (mine, yours) in enumerate(zip(ours, theirs, strict=False)):
        at = f"step {mine[0].number}"
        samples, others = _samples(base, mine), _samples(other, yours)
        if samples != others:
            count = f"{others.total()} instead of {samples.total()}, of which {(others & samples).total()} are the same"
            return Verdict(f"{at} takes other samples: {count}", DIVIDE, mine[0])
        expected, rates = (steps[0].before.rates for steps in (mine, yours))
        if rates != expected:
            return Verdict(f"{at} uses other learning rates: {rates} instead of {expected}", RATES, mine[0])
        if unknown or (number and autocast):
            continue
        difference, text = _distance(mine, yours, base)
        if not text:
            unknown = "each rank has a part of the gradients"
        elif difference > (LATER if number else first):
            return Verdict(f"{at} has other gradients: {text}", AVERAGE, mine[0])
        largest = max(largest, difference)
    if len(ours) != len(theirs):
        return Verdict(f"it takes {len(theirs)} optimizer steps and not {len(ours)}", DIVIDE, ours[-1][0])
    if unknown:
        return Verdict(f"the same samples; numbers are not compared, since {unknown}")
    later = "the others are not compared" if autocast else f"{LATER} later"
    return Verdict(
        f"the same samples, and gradients within {largest:.2g} ({first:.2g} are allowed in the first step, {later})"
    )


def _distance(mine: Sequence[Step], yours: Sequence[Step], base: Trace) -> tuple[float, str]:
    """The largest difference of a parameter's gradient, as it is before clipping, over its size; and what to say of it."""
    found = [(0.0, "")]
    for number in mine[0].own:
        ours, theirs = unscaled(number, mine[0]), unscaled(number, yours[0])
        passes = [one for step in mine for one in step.all(Backward)]
        size = WEIGHTS * max((one.computed.get(number, [0.0])[-1] for one in passes), default=0.0)
        if size and ours and theirs:
            distance = max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / size
            found.append((distance, f"{base.names.get(number, number)} differs by {distance:.2g} of its size"))
    return max(found)


def _samples(trace: Trace, steps: Sequence[Step]) -> Counter[int]:
    """How often each sample is in the global batch of a step."""
    return Counter(row for rank, step in zip(trace.ranks, steps, strict=True) for row in _rows(rank, step))


def _rows(trace: RankTrace, step: Step) -> list[int]:
    """The checksums of the samples that a rank trains on in a step: what DDP gets, and without DDP, what the loader gives.

    A loader may give a batch of the next step already. A pass whose gradients are thrown away, such as one to warm up, does not count.
    """
    rows: list[int] = []
    forwards: list[int] = []
    for event in step.all(Forward, Backward):
        if isinstance(event, Forward):
            forwards += event.rows
        elif isinstance(event, Backward):
            starts_anew = not any(any(event.before.get(number, ())) for number in step.own)
            rows, forwards = (forwards if starts_anew else rows + forwards), []
    if rows:
        return rows
    training = {epoch.begin.iterator for epoch in epochs(trace) if epoch.trains}
    return [row for batch in step.all(Batch) if batch.iterator in training for row in batch.rows]
