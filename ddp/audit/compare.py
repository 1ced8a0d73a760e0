"""Two runs of a job side by side: what must be equal, and what differs by design.

With the same initial weights and global batches, a run on other ranks adds the same terms in another order. So its first gradients may
differ by rounding: relative to what each rank computes, by ``eps * sqrt(n)`` for n terms (the standard deviation of a sum's rounding
errors; Higham and Mary, SIAM J. Sci. Comput. 2019), and by the eps of autocast's dtype, times ``SAFETY``. Rounding errors grow from step
to step, so later steps are compared less closely, and not at all under autocast. A repeated or resumed run must have the same bits.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.errors import UsageError
from ddp.audit.detectors import averages
from ddp.audit.detectors.averages import unscaled
from ddp.audit.metrics import other_metrics
from ddp.audit.trace import Epoch, RankTrace, Step, Trace
from ddp.audit.watch.event_types import Autocast, Backward, Batch, Draw, Event, Forward, LoaderBegins, Local, Loss, Save

SAFETY = 16.0
EPS = 2.0**-23  # of float32
UNASKED = 1e-3  # the least difference that is told of where nobody has said that the runs must be equal
LATER = 1e-2  # for the steps after the first
SAME_SCHEDULE = 0.1  # how much a rate may be off where a schedule is longer, by rounding its steps
UNIFORM = 0.02  # how much a factor of all gradients may be off
WEIGHTS = (
    27.5  # the norm of a probe's weights (watch/tensors.py): no probe is larger than this times its elements' norm
)


class Verdict(NamedTuple):
    """The result of a comparison of two runs.

    :ivar text: what is equal, or the first thing that is wrong
    :ivar cure: of what is wrong
    :ivar at: where it is wrong, if it is
    :ivar samples: whether the same samples were trained on; None if that cannot be told
    :ivar numbers: the same of gradients
    :ivar metrics: the same of what evaluations reduce over the ranks
    :ivar saves: False if checkpoints are saved after other steps, though the weights are the same; else None, since that tells nothing
    """

    text: str
    cure: str = ""
    at: Event | None = None
    samples: bool | None = None
    numbers: bool | None = None
    metrics: bool | None = None
    saves: bool | None = None


LOAD = "Save the weights after a step, before the run is killed, and load them at the start"
SEED = "Seed what is drawn: weights, orders, augmentation, dropout"
POSITION = "Save the number of the epoch, and the position in it, and set the sampler to them after a resume"
DIVIDE = "Let the ranks divide each global batch, without padding; --batch-flag is for a batch size of one rank"
RATES = "With the same global batches, the rate must not depend on the number of ranks"
AVERAGE = "Weigh each sample by 1 / the global batch, whatever the number of ranks and micro-steps"
COUNT = "Count each sample once: sum correct answers and counts over the ranks, and divide then"
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


def same_rest(base: Trace, resumed: Trace) -> Verdict:
    """Compare a run that was started again with what was left of the first one."""
    steps, again = base.ranks[0].steps, resumed.ranks[0].steps
    if not again:
        return Verdict("nothing was left to do")
    first = again[0].before
    start = next((i for i, step in enumerate(steps) if step.before.parameters == first.parameters), None)
    if start is None:
        return Verdict("it goes on with weights that the undisturbed run never has before a step", LOAD, first)
    if start == 0:
        return Verdict("it begins anew, with the initial weights", LOAD, first)
    return same_bits(base, resumed, start)


def same_bits(base: Trace, other: Trace, start: int = 0) -> Verdict:
    """Compare a run with the steps of the first from one on."""
    for rank, repeated in zip(base.ranks, other.ranks, strict=False):
        for step, again in zip(rank.steps[start:], repeated.steps, strict=False):
            at = f"step {step.number} of rank {rank.rank}"
            rows = _rows(repeated, again)
            if _rows(rank, step) != rows:
                same = [f"the samples of step {one.number}" for one in rank.steps if _rows(rank, one) == rows]
                cure = POSITION if start else SEED
                return Verdict(f"{at} takes {[*same, 'other samples'][0]}", cure, step.before, samples=False)
            for value, text, cure in BITS:
                if value(step) != value(again):
                    return Verdict(f"{at} {text}", cure if start else SEED, step.before, numbers=False)
    expected, got = len(base.ranks[0].steps) - start, len(other.ranks[0].steps)
    if expected != got:
        return Verdict(f"it takes {got} steps where {expected} are left", POSITION, base.ranks[0].steps[-1].before)
    since = f" (from step {start} on)" if start else ""
    return Verdict(f"the same samples and the same bits in {got} steps{since}", samples=True, numbers=True)


def same_numbers(base: Trace, other: Trace, is_asked: bool = True) -> Verdict:
    """Compare runs that divide the global batches differently.

    :param is_asked: whether they must take the same batches at the same rates; if not, the order may be another one, and rates and
        losses each rank's own, by design
    :raises UsageError: if a run has no step that all ranks took
    """
    ours, theirs = list(base.steps()), list(other.steps())
    if not (ours and theirs):
        raise UsageError("under join, and with an optimizer that calls a closure, there are no global steps to compare")
    coverage = None if is_asked else _coverage(base, other)
    steps = coverage if coverage and coverage.at else _steps(base, other, ours, theirs, is_asked)
    samples = coverage.samples if coverage else steps.samples
    event, text = other_metrics(base, other, weights_are_same=steps.numbers is True)
    metrics = None if text is None else event is None
    if event and not steps.at:
        return Verdict(text or "", COUNT, event, samples, steps.numbers, metrics)
    texts, saves = [steps.text, *([text] if text else [])], None
    mine, yours = ([one.step for one in trace.ranks[0].all(Save)] for trace in (base, other))
    if steps.numbers and mine != yours:  # which may also be by a clock
        texts.append(f"checkpoints are saved after steps {mine}, and after {yours} on {_ranks(other)}")
        saves = False
    return steps._replace(text="; ".join(texts), samples=samples, metrics=metrics, saves=saves)


def _coverage(base: Trace, other: Trace) -> Verdict | None:
    """Compare which samples each epoch has, whatever their order; None if that cannot be told.

    Ranks repeat samples, or leave some out. If each run has samples that the other one has not, they are drawn, or each rank's own.
    """
    found = None
    for number, (ours, theirs) in enumerate(zip(base.epochs(train=True), other.epochs(train=True), strict=False)):
        slack = sum(max(len(batch.rows) for batch in epoch.batches) for epoch in ours)  # padded, or dropped, at the end
        if not slack:
            return None  # no sample is known
        mine, yours = _identities(ours, theirs)
        repeated = mine.total() - len(mine) - yours.total() + len(yours)
        added, left_out = len(mine - yours), len(set(yours) - set(mine))
        if repeated >= slack or (left_out >= slack > len(set(mine) - set(yours))):
            counts = (f"{some.total()} samples, {len(some)} of them different" for some in (mine, yours))
            text = f"epoch {number} has {next(counts)}; on {_ranks(other)} it has {next(counts)}"
            return Verdict(text, DIVIDE, ours[0].begin, samples=False)
        if max(added, left_out) >= slack:
            return None
        found = Verdict("", samples=True)
    return found


def _identities(ours: Sequence[Epoch], theirs: Sequence[Epoch]) -> tuple[Counter[int], Counter[int]]:
    """How often each sample is in an epoch of two runs: by its contents, or by its number where labels show that it is one sample."""
    mine, yours = (Counter(itertools.chain(*(epoch.rows for epoch in some))) for some in (ours, theirs))
    labeled = set[tuple[int, int]]().union(*(epoch.numbered(targets=True) for epoch in (*ours, *theirs)))
    if mine.keys().isdisjoint(yours) and labeled and len(labeled) == len(dict(labeled)):
        mine, yours = (Counter(itertools.chain(*(epoch.samples for epoch in some))) for some in (ours, theirs))
    return mine, yours


def _steps(
    base: Trace, other: Trace, ours: Sequence[list[Step]], theirs: Sequence[list[Step]], is_asked: bool
) -> Verdict:
    """Compare samples, rates and gradients from step to step."""
    unknown = _by_design(base, other)
    autocast = max((float(event.eps) for event in base.ranks[0].all(Autocast)), default=0.0)
    terms = sum(event.terms for step in ours[0] for event in step.all(Loss))
    first = max(SAFETY * (autocast + EPS * math.sqrt(terms or 1)), 0.0 if is_asked else UNASKED)
    rows_of = _rows if other.ranks[0].all(Forward) else _loaded  # on one rank a script may wrap no model
    largest = size = 0.0
    for number, (mine, yours) in enumerate(zip(ours, theirs, strict=False)):
        at, event = f"step {mine[0].number}", mine[0].before
        samples, others = _counted(base, mine, rows_of), _counted(other, yours, rows_of)
        numbers = _counted(base, mine, _numbers)
        if samples != others and (is_asked or not numbers or numbers != _counted(other, yours, _numbers)):
            if is_asked:
                count = f"{others.total()}, of which {(others & samples).total()} are among the {samples.total()} of {_ranks(base)}"
                return Verdict(f"{at} takes other samples: {count}", DIVIDE, event, samples=False)
            if not others <= samples:
                return Verdict("the batches come in another order, so numbers are not compared", samples=None)
        if samples != others:
            unknown = unknown or "samples are augmented with random numbers, or padded"
        expected, rates = (steps[0].before.rates for steps in (mine, yours))
        if not _same_rates(expected, rates):
            if not is_asked and _scaled(expected, rates, base, other):
                unknown = unknown or "the learning rate grows with the number of ranks"
            elif not is_asked and _stretched(base, other):
                unknown = unknown or "the script counts its schedule's steps by a batch that did not grow"
            elif is_asked or not unknown:
                return Verdict(
                    f"{at} uses other learning rates: {rates} instead of {expected}", RATES, event, True, numbers=False
                )
        if number and autocast:
            continue
        allowed = LATER if number else first
        difference, text, scale, factor = _distance(mine, yours, base)
        size = max(size, scale)
        if factor and text and not is_asked:
            text = f"the gradients are {factor:.3g} times those on {_ranks(other)}"
            return Verdict(text, AVERAGE, event, True, numbers=False)
        if unknown:
            continue
        if not text:
            unknown = "each rank has a part of the gradients"
        elif difference > allowed and not is_asked and not _is_of_torch(mine):
            unknown = "a part of the loss is no mean over samples that torch computes"
        elif difference > allowed:
            return Verdict(f"{at} has other gradients: {text}", AVERAGE, event, True, numbers=False)
        else:
            largest = max(largest, difference)
    few = 0 if is_asked else len(base.ranks[0].epochs)  # an epoch may have a step more, of padding
    if abs(len(ours) - len(theirs)) > few and (is_asked or not unknown):
        return Verdict(
            f"it takes {len(theirs)} optimizer steps and not {len(ours)}", DIVIDE, ours[-1][0].before, samples=False
        )
    if unknown:
        return Verdict(f"the same samples; numbers are not compared, since {unknown}", samples=True)
    losses = {one.loss for step in base.ranks[0].steps for one in step.all(Backward)}
    if not size or len(losses) == 1 < len(ours):
        why = "the loss does not move" if size else "all gradients are 0"
        return Verdict(f"the same samples; numbers prove nothing, since {why}", samples=True)
    later = "the others are not compared" if autocast else f"{LATER} later"
    text = f"the same samples, and gradients within {largest:.2g} ({first:.2g} are allowed in the first step, {later})"
    return Verdict(text, samples=True, numbers=True)


def _by_design(base: Trace, other: Trace) -> str:
    """Why gradients differ between numbers of ranks though nothing is wrong; empty if nothing tells."""
    rank, steps = base.ranks[0], base.ranks[0].steps
    layer = next((event.layer for event in steps[0].all(Forward) if event.layer), None)
    if layer:
        return f"{layer} differs by design"
    if local := rank.all(Local):
        return local[0].why
    draws = any(
        step.all(Draw) for step in steps[1:]
    ) or any(  # the first step's events begin with the data and the model
        before.before.draws != after.before.draws and not after.all(LoaderBegins)
        for before, after in itertools.pairwise(steps)
    )
    if draws:
        return "each step draws random numbers"
    first = other.ranks[0].steps[0]
    if steps[0].before.parameters != first.before.parameters and not steps[0].after.sharded:
        return "the initial weights are other ones, which are not seeded"
    finding = next(averages.detect(base), None)
    return f"the gradients are not averaged ({finding.name})" if finding else ""


def _is_of_torch(steps: Sequence[Step]) -> bool:
    """Whether the losses that were seen make up all from which the backward passes began."""
    return all(
        math.isclose(
            sum(one.share for one in step.losses),
            sum(one.loss for one in step.passes),
            rel_tol=UNASKED,
            abs_tol=EPS,
        )
        for step in steps
    )


def _same_rates(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    return len(ours) == len(theirs) and all(map(math.isclose, ours, theirs))


def _scaled(ours: Sequence[float], theirs: Sequence[float], base: Trace, other: Trace) -> bool:
    """Whether rates grow with the number of ranks, or its root: the rules for batches that grow with it, too."""
    ratio = base.world_size / other.world_size
    return any(_same_rates(ours, [rate * rule for rate in theirs]) for rule in (ratio, math.sqrt(ratio)))


def _stretched(base: Trace, other: Trace) -> bool:
    """Whether the schedule of the other run is as many times as long as the ranks are more, up to rounding."""
    ratio = base.world_size / other.world_size
    ours, theirs = ([step.before.rates for step in trace.ranks[0].steps] for trace in (base, other))
    changes = [at for at, (one, two) in enumerate(itertools.pairwise(ours), 1) if one != two]
    if changes and abs(changes[-1] - len(ours) / ratio) <= 1:
        return False  # it is over at that part of the run: its length is divided by the ranks
    pairs = [(mine, theirs[round(at * ratio)]) for at, mine in enumerate(ours[: int(len(theirs) / ratio)])]
    close = functools.partial(math.isclose, rel_tol=SAME_SCHEDULE)
    return len(pairs) > 1 and all(len(a) == len(b) and all(map(close, a, b)) for a, b in pairs)


def _distance(mine: Sequence[Step], yours: Sequence[Step], base: Trace) -> tuple[float, str, float, float]:
    """The largest difference of a parameter's gradient, as it is before clipping, over its size; and what to say of it.

    :returns: also the largest size, and the factor between the runs if it is that of the numbers of ranks, or 0
    """
    found = [(0.0, "")]
    sizes, factors = [0.0], list[float]()
    for number in mine[0].own:
        ours, theirs = unscaled(number, mine[0]), unscaled(number, yours[0])
        passes = [one for step in mine for one in step.computed]
        size = WEIGHTS * max((one.get(number, [0.0])[-1] for one in passes), default=0.0)
        if size and ours and theirs:
            distance = max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / size
            found.append((distance, f"{base.names.get(number, number)} differs by {distance:.2g} of its size"))
            sizes.append(size)
            factors += [a / b for a, b in zip(ours, theirs, strict=True) if abs(b) > LATER * size]
    ratio = len(mine) / len(yours)
    same = [one for one in (ratio, 1 / ratio) if factors and all(abs(f / one - 1) < UNIFORM for f in factors)]
    return *max(found), max(sizes), same[0] if same and ratio != 1 else 0.0


def _counted(trace: Trace, steps: Sequence[Step], of: Callable[[RankTrace, Step], list[int]]) -> Counter[int]:
    """How often each sample is in the global batch of a step.

    :param of: gives the numbers that stand for the samples in a rank's part of it
    """
    return Counter(number for rank, step in zip(trace.ranks, steps, strict=True) for number in of(rank, step))


def _rows(trace: RankTrace, step: Step) -> list[int]:
    """The checksums of the samples that a rank trains on in a step: what DDP gets, and without DDP, what the loader gives.

    A loader may give a batch of the next step already. A pass whose gradients are thrown away, such as one to warm up, does not count.
    """
    rows: list[int] = []
    forwards: list[int] = []
    for event in step.all(Forward, Backward):
        if isinstance(event, Forward):
            forwards += event.rows
        else:
            rows, forwards = rows + (forwards if event in step.passes else []), []
    return rows or _loaded(trace, step)


def _loaded(trace: RankTrace, step: Step) -> list[int]:
    """The checksums of the samples in a step that come from a loader for training."""
    return [row for batch in _training(trace, step) for row in batch.rows]


def _numbers(trace: RankTrace, step: Step) -> list[int]:
    """The numbers of these samples, where they are known."""
    return [number for batch in _training(trace, step) for number in batch.indices or ()]


def _training(trace: RankTrace, step: Step) -> list[Batch]:
    return [batch for batch in step.all(Batch) if batch.iterator in trace.training_iterators]


def _ranks(trace: Trace) -> str:
    return f"{trace.world_size} rank{'s' * (trace.world_size > 1)}"
