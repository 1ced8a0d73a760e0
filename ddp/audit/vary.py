"""The same job again: on other numbers of ranks, with more micro-steps, killed and resumed, or as it was. It must come to the same result.

With the same initial weights and global batches, a run on other ranks adds the same terms in another order. So its first gradients may
differ by rounding: relative to what each rank computes, by ``eps * sqrt(n)`` for n terms (the standard deviation of a sum's rounding
errors; Higham and Mary, SIAM J. Sci. Comput. 2019), and by the eps of autocast's dtype, times ``SAFETY``. Rounding errors grow from step
to step, so later steps are compared less closely, and not at all under autocast. A repeated or resumed run must have the same bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import UsageError
from ddp.audit.detectors.averages import unscaled
from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Event, RankTrace, Step, Trace, epochs

KINDS = ("repeat", "ranks", "micro-steps", "resume")
SAFETY = 16.0
EPS = 2.0**-23  # of float32
LATER = 1e-2  # for the steps after the first
RUN = "{run}"  # in the script's arguments: a folder of the run

Runner = Callable[[Sequence[str], int, int | None, str | None], Trace]


@dataclass(frozen=True)
class Flags:
    """The script's own flags, without dashes; None where it has none.

    :ivar batch: samples of a rank and micro-step
    :ivar accumulation: micro-steps of an optimizer step
    :ivar resume: a switch with which the script is started again
    """

    batch: str | None = None
    accumulation: str | None = None
    resume: str | None = None


class Variation(NamedTuple):
    """What became of one, and what is wrong with it.

    :ivar is_judged: whether the script ran
    """

    what: str
    text: str
    finding: Finding | None = None
    is_judged: bool = True

    def as_json(self) -> dict[str, object]:
        return {"what": self.what, "text": self.text, "is_right": self.is_judged and self.finding is None}


class Plan(NamedTuple):
    """A run of the script that is compared with the first one.

    :ivar compare: gets both traces
    """

    what: str
    script: Sequence[str]
    ranks: int
    compare: Callable[[str, Trace, Trace], Variation]


def plan(kinds: Sequence[str], flags: Flags, script: Sequence[str], ranks: int) -> list[Plan]:
    """What to run, apart from ``resume``.

    :raises UsageError: if something cannot be varied with this script's arguments
    """
    for name in filter(None, (flags.batch, flags.accumulation)):
        if f"--{name}" not in script[:-1]:
            raise UsageError(
                f"--{name} is not among the script's arguments: give it there, as --{name} N, with its value on {ranks} ranks"
            )
    plans = []
    if "repeat" in kinds:
        plans.append(Plan("run again", script, ranks, _same_bits))
    if "ranks" in kinds:
        for other in (ranks - 1, ranks + 1):
            changed = _changed(script, flags.batch, ranks, other)
            plans.append(Plan(f"on {other} rank{'s' * (other > 1)}", changed, other, _same_numbers))
    if "micro-steps" in kinds:
        if not flags.accumulation:
            raise UsageError(
                "--vary micro-steps needs --accumulation-flag: the name of the script's flag for its micro-steps"
            )
        changed = _changed(_changed(script, flags.accumulation, 2, 1), flags.batch, 1, 2)
        plans.append(Plan("with twice as many micro-steps", changed, ranks, _same_numbers))
    if "resume" in kinds and not any(RUN in argument for argument in script):
        raise UsageError(
            f"--vary resume needs {RUN} among the script's arguments: it stands for a folder of the run, with its checkpoints"
        )
    return plans


def vary(
    plans: Sequence[Plan], resumes: bool, flags: Flags, script: Sequence[str], base: Trace, run: Runner
) -> Iterator[Variation]:
    """Run the script again, each time in another way.

    :param resumes: whether to kill it and start it again, at the end
    :param base: the script as it is
    :param run: runs arguments on ranks, up to an optimizer step at which it is killed, in the folder of an earlier run of this name
    """
    for what, changed, ranks, compare in plans:
        try:
            yield compare(what, base, run(changed, ranks, None, None))
        except UsageError as error:
            yield Variation(what, f"not compared: {error}", is_judged=False)
    if resumes:
        yield _resumed(base, flags, script, run)


def _changed(script: Sequence[str], name: str | None, factor: int, divisor: int) -> list[str]:
    """The arguments with one value multiplied and divided.

    :raises UsageError: if it cannot be divided
    """
    changed = list(script)
    if name:
        at = changed.index(f"--{name}") + 1
        value, rest = divmod(int(changed[at]) * factor, divisor)
        if rest:
            raise UsageError(f"--{name} {changed[at]}, times {factor}, is no multiple of {divisor}: take one")
        changed[at] = str(value)
    return changed


def _resumed(base: Trace, flags: Flags, script: Sequence[str], run: Runner) -> Variation:
    kill_at = max(1, 2 * len(base.ranks[0].steps) // 3)
    run(script, base.world_size, kill_at, "resume")
    resumed = run([*script, f"--{flags.resume}"] if flags.resume else script, base.world_size, None, "resume")
    what = f"killed after step {kill_at - 1} and started again"
    steps, again = base.ranks[0].steps, resumed.ranks[0].steps
    start = next((i for i, step in enumerate(steps) if again and _weights(step) == _weights(again[0])), None)
    if not again:
        return Variation(what, "nothing was left to do")
    if start is None:
        return _wrong(what, "it goes on with weights that the undisturbed run never has before a step", again[0])
    if start == 0:
        return _wrong(
            what, "it begins anew, with the initial weights: nothing was saved by then, or nothing is loaded", again[0]
        )
    return _same_bits(f"{what}, at step {start}", base, resumed, start)


def _same_bits(what: str, base: Trace, other: Trace, start: int = 0) -> Variation:
    """Compare a run with the steps of the first from one on."""
    for rank, repeated in zip(base.ranks, other.ranks, strict=False):
        for step, again in zip(rank.steps[start:], repeated.steps, strict=False):
            if _rows(rank, step) != _rows(repeated, again):
                same = [other.number for other in rank.steps if _rows(rank, other) == _rows(repeated, again)]
                which = f"those of step {same[0]}" if same else "other samples"
                return _wrong(what, f"step {step.number} of rank {rank.rank} takes {which}", again)
            for name, value in (
                ("begins with other weights", _weights),
                ("uses another learning rate", lambda step: step.last("before_step")["rates"]),
                ("has other gradients", lambda step: step.last("before_step").get("gradients")),
                ("ends with other weights", lambda step: step.last("step")["parameters"]),
            ):
                if value(step) != value(again):
                    return _wrong(what, f"step {step.number} of rank {rank.rank} {name}{_cause(name, start)}", again)
    expected, got = len(base.ranks[0].steps) - start, len(other.ranks[0].steps)
    if expected != got:
        return _wrong(what, f"it takes {got} steps where {expected} are left", other.ranks[0].steps[-1])
    return Variation(what, f"the same samples and the same bits in {got} steps")


def _cause(name: str, start: int) -> str:
    if not start:
        return ": something is not seeded"
    if "gradients" in name:
        return ", from the same weights and samples: a generator is not restored, or BatchNorm's statistics"
    return ", from the same gradients: the optimizer's state is not restored" if "ends" in name else ""


def _same_numbers(what: str, base: Trace, other: Trace) -> Variation:
    """Compare runs that divide the global batches differently."""
    ours, theirs = list(base.steps()), list(other.steps())
    for mine, yours in zip(ours, theirs, strict=False):
        samples, others = (
            Counter(row for rank, step in zip(trace.ranks, steps, strict=True) for row in _rows(rank, step))
            for trace, steps in ((base, mine), (other, yours))
        )
        if samples != others:
            count = f"{others.total()} instead of {samples.total()}, of which {(others & samples).total()} are the same"
            return _wrong(what, f"step {mine[0].number} takes other samples: {count}", yours[0])
    if len(ours) != len(theirs):
        return _wrong(what, f"it takes {len(theirs)} optimizer steps and not {len(ours)}", theirs[-1][0])
    layers = [event["layer"] for event in ours[0][0].all("forward") if event["layer"]]
    if layers:
        return Variation(what, f"the same samples; numbers are not compared, since {layers[0]} differs by design")
    autocast = max((event["eps"] for event in base.ranks[0].all("autocast")), default=0.0)
    terms = sum(event["terms"] for step in ours[0] for event in step.all("loss"))
    allowed, largest = SAFETY * (float(autocast) + EPS * math.sqrt(terms or 1)), 0.0
    for mine, yours in zip(ours, theirs, strict=False):
        difference, name = _distance(mine, yours, base)
        if not name:
            return Variation(
                what, "the same samples; numbers are not compared, since each rank has a part of the gradients"
            )
        if difference > allowed:
            text = f"of {name}, by {difference:.2g} of its size ({allowed:.2g} are allowed)"
            return _wrong(what, f"step {mine[0].number} has other gradients: {text}", yours[0])
        largest = max(largest, difference)
        if autocast:
            numbers = f"{largest:.2g} ({allowed:.2g} are allowed)"
            return Variation(what, f"the same samples; the first gradients within {numbers}")
        allowed = LATER
    return Variation(what, f"the same samples, and gradients within {largest:.2g}")


def _distance(mine: Sequence[Step], yours: Sequence[Step], base: Trace) -> tuple[float, str]:
    """The largest difference of a parameter's gradient, as it is before clipping, over its size; and the parameter."""
    found = [(0.0, "")]
    for number in mine[0].own:
        ours, theirs = unscaled(number, mine[0]), unscaled(number, yours[0])
        size = max((one.get("computed", {}).get(number, [0.0])[-1] for one in mine[0].all("backward")), default=0.0)
        if size and ours and theirs:
            distance = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            found.append((distance / size, base.names.get(number, number)))
    return max(found)


def _weights(step: Step) -> object:
    return step.last("before_step").get("parameters")


def _rows(trace: RankTrace, step: Step) -> list[int]:
    """The checksums of the samples that a rank trains on in a step: what DDP gets, and without DDP, what the loader gives.

    A loader may give a batch of the next step already. A pass whose gradients are thrown away, such as one to warm up, does not count.
    """
    rows: list[int] = []
    forwards: list[int] = []
    for event in step.all("forward", "backward"):
        if event["kind"] == "forward":
            forwards += event["rows"]
            continue
        before = event.get("before") or {}
        starts_anew = not any(any(before.get(number, ())) for number in step.own)
        rows, forwards = (forwards if starts_anew else rows + forwards), []
    if rows:
        return rows
    training = {epoch.begin["iterator"] for epoch in epochs(trace) if epoch.trains}
    return [row for batch in step.all("batch") if batch["iterator"] in training for row in batch["rows"]]


def _wrong(what: str, text: str, step: Step) -> Variation:
    event: Event = step.last("before_step")
    cure = "Compare what the script does there in both runs"
    return Variation(what, text, Finding(f"{what}: {text}", cure, event, "ddp/audit/README.md"))
