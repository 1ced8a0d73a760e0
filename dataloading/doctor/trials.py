"""Which settings of a loader help, measured: on its own data set, in turns, and for a script within the script's own loop.

The search goes coordinate by coordinate. First come numbers of workers, then the other arguments at the best number. A few turns
leave out what is clearly slower; what is left is compared with the present setting in fresh turns, whose paired ratios are
printed. The present setting takes part in them twice. Its ratio with itself says how much two equal settings differ here, and
only what gains more than that is called a gain.

**The prediction.** Training and workers compete for the same cores, so the rate of a loader alone and the time of a step alone do not
tell the time of a step in the loop: on few cores, both become slower. Therefore nothing is added up from parts that were measured
apart. The step is timed in the script's own loop, with the new setting, while the script trains. What is left to a model is how
long an epoch takes that was not run to its end:

    epoch = start of the workers and the first batch of each + (steps - workers) x seconds of a step

The first epoch takes longer by what the script's first steps take (caches, memory), and, with persistent workers, by their start. A
check then runs the script with the setting put in from outside.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from common.benchmarking.other_work import OtherWork
from common.benchmarking.timing import NOISE, Spread, interleave, paired_ratio
from common.machine import usable_cores
from dataloading.doctor.script_run import GRACE_S, Script, ScriptEnded, ScriptRun
from dataloading.doctor.watch.settings import Setting, changed, facts_of, loader_turn
from dataloading.doctor.watch.turn import NoTurn, Turn, alone, one_line

LEAST_GAIN = 1.05
HOPELESS = 1.5  # times as slow as the best in its first turn: no further turns
FETCH_THREADS = 16  # as in dataloading/bench/verdict.py
LATE = 0.5  # share of a sample's time in which no core worked on it: it is late, and threads may help
STARTING = 0.05  # share of an epoch that the start of its workers takes: start methods may matter
PATIENCE_S = 30.0
SEARCH_ROUNDS, CONFIRM_ROUNDS = 3, 5
TURN_S = 0.3, 2.0  # the shortest and longest of a turn's steady part
MOST_WORKERS = 16  # beyond the cores, for storage that answers late
DEFAULTS: Setting = {"prefetch_factor": 2, "persistent_workers": False, "in_order": True}  # of what only workers have
ALWAYS = ("num_workers", "fetch_threads", "whole_batches")  # have a meaning without workers, too
CHECKED_EPOCHS = 2
MOST_RESTARTS = 8  # of a script that ends before all was tried
SAME = "the present setting, again"


@dataclass(frozen=True)
class Gain:
    """A setting that helps.

    :param setting: what differs from the present one
    :param ratio: times as many batches/s as with the present setting: those of an epoch, with the start of its workers
    :param rate: batches/s
    """

    setting: Setting
    ratio: Spread
    rate: float

    def __str__(self) -> str:
        low, high = self.ratio.low, self.ratio.high
        return f"{in_words(self.setting)}: {self.ratio.median:.2f}x [{low:.2f} to {high:.2f}] as many batches/s"


@dataclass
class Tried:
    """The end of a search.

    :param place: ``file:line`` of the loader
    :param gains: the best first; none if nothing helps
    :param now: batches/s with the present setting
    :param steps: of an epoch; math.inf if that is not known
    :param best: the turns of the best setting, and ``started``: that in which its workers were started
    :param warm_up_s: seconds that the script's first steps took longer than others
    :param notes: what could not be tried, and why
    :param busy: how much other programs used the cores; None if they did not
    """

    place: str
    gains: list[Gain] = field(default_factory=list)
    now: float = 0.0
    steps: float = math.inf
    best: list[Turn] = field(default_factory=list)
    started: Turn | None = None
    warm_up_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    busy: str | None = None

    @property
    def lines(self) -> list[str]:
        """For the terminal."""
        lines = [f"{self.place}: {gain}" for gain in self.gains]
        if self.now and not lines:
            lines = [f"{self.place}: no setting that was tried helps: {self.now:.1f} batches/s"]
        return [*lines, *self.notes, *([self.busy] if self.busy else [])]


def in_words(setting: Setting) -> str:
    """A setting as it is written into the call of ``DataLoader``."""
    special = {
        "one_thread": "worker_init_fn=lambda _: (torch.set_num_threads(1), cv2.setNumThreads(0))",
        "fetch_threads": f"threads: ThreadedFetch(dataset, {setting.get('fetch_threads')}) of dataloading/dataset/batches.py",
        "whole_batches": "whole batches: sampler=BatchSampler(sampler, batch_size, drop_last), batch_size=None",
    }
    return ", ".join(special.get(name) or f"{name}={value!r}" for name, value in setting.items())


def best_settings(loader: DataLoader[Any], seconds: float = 60.0) -> list[Gain]:
    """The settings with which a loader gives more batches/s, the best first; empty if there is none.

    The loader takes its turns alone: nothing trains meanwhile.

    :param seconds: that this may take, about
    """
    return try_loader(loader, seconds).gains


def try_loader(loader: DataLoader[Any], seconds: float, place: str = "the loader") -> Tried:
    """Try settings on a loader of this program, see :func:`best_settings`."""
    kept: dict[str, DataLoader[Any]] = {}

    def take(setting: Setting, batches: int) -> Turn:
        twin = kept.pop(str(setting), None) or changed(loader, setting)
        try:
            turn: Turn = alone(loader_turn(twin, batches, patience_s=PATIENCE_S))
        except NoTurn:
            raise
        except Exception as error:  # of the data set, in a worker or here
            raise NoTurn(one_line(error)) from error
        if twin.persistent_workers and facts["length"] is not None:
            kept[str(setting)] = twin
        return turn

    facts = facts_of(loader)
    return _Search(take, facts, seconds, place, facts["length"] or math.inf).run()


def try_settings(script: Script, seconds: float, steps: float | None = None) -> Tried:
    """Try settings within the loop of a script, while it trains.

    :param seconds: that this may take, about, after the script has come to its loader
    :param steps: of an epoch, where it is not the length of the loader
    """
    try:
        with _Rehearsal(script) as rehearsal:
            length = steps or rehearsal.facts["length"] or math.inf
            return _Search(rehearsal.take, rehearsal.facts, seconds, script.place, length).run()
    except ScriptEnded as error:
        return Tried(script.place, notes=[f"no setting could be tried: {error}"])


class _Rehearsal:
    """A script that rehearses. It is run again when it has come to its end, or to that of a schedule."""

    def __init__(self, script: Script) -> None:
        self._script, self._restarts, self._turns = script, 0, 0

    def __enter__(self) -> _Rehearsal:
        self._run = ScriptRun(self._script, None, PATIENCE_S)
        self.facts = self._run.__enter__().facts
        return self

    def take(self, setting: Setting, batches: int) -> Turn:
        while True:
            try:
                answer = self._run.ask(setting, batches)
                break
            except ScriptEnded:
                if not self._turns or self._restarts == MOST_RESTARTS:
                    raise
                self._restarts, self._turns = self._restarts + 1, 0
                self.__exit__()
                self.__enter__()
        self._turns += 1
        if "error" in answer:
            raise NoTurn(answer["error"])
        return Turn(**answer)

    def __exit__(self, *error: object) -> None:
        self._run.__exit__()


class _Search:
    """Turns of many settings, and what they tell.

    :param take: a turn with a setting of so many batches
    :param facts: of the loader, see ``facts_of``
    :param seconds: that the search may take
    :param steps: of an epoch
    """

    def __init__(
        self,
        take: Callable[[Setting, int], Turn],
        facts: Mapping[str, Any],
        seconds: float,
        place: str,
        steps: float,
    ) -> None:
        self._take, self._facts, self._steps = take, facts, steps
        self._ends = time.monotonic() + seconds / 2  # of a phase: the workers, the rest, the comparison
        self._seconds, self._batches = seconds, 4
        self._turns: dict[str, list[Turn]] = {}
        self._tried = Tried(place, steps=steps)

    def run(self) -> Tried:
        tried, others = self._tried, OtherWork()
        now: Setting = self._facts["present"]
        with contextlib.suppress(_Stopped):
            first = self._first_turn(now)
            tried.warm_up_s = max(0.0, sum(first.uses) - len(first.uses) * statistics.median(first.uses))
            least, most = TURN_S
            aim = min(most, max(least, self._seconds / 70))
            self._batches = max(2 * now["num_workers"], 4, min(500, round(aim / first.step_s)))
            best = self._best_number(now)
            self._confirm(now, [best, *self._others(best)])
        tried.busy = others.doubt()
        return tried

    def _first_turn(self, now: Setting) -> Turn:
        """The present setting's; it also warms up."""
        try:
            return self._turn(now)
        except NoTurn as error:
            raise self._stop(f"no setting could be tried: with the present one, {error}") from error

    def _stop(self, note: str) -> _Stopped:
        self._tried.notes.append(note)
        return _Stopped()

    def _turn(self, setting: Setting, name: str = "") -> Turn:
        try:
            workers = setting["num_workers"]
            turn = self._take(setting, max(1, self._batches // max(1, workers)) * max(1, workers))
        except ScriptEnded as error:
            raise self._stop(f"not all settings were tried: {error}") from error
        self._turns.setdefault(name or str(setting), []).append(turn)
        return turn

    def _screen(self, settings: Sequence[Setting]) -> list[tuple[Setting, Spread]]:
        """Settings in turns; for each that is not hopeless, the ratio of its seconds to the first one's, which is one of them."""
        firsts: dict[str, float] = {}
        named = {str(setting): setting for setting in settings}
        for name, setting in list(named.items()):
            try:
                firsts[name] = self._turn(setting).epoch_s(self._steps)
            except NoTurn as error:
                self._tried.notes.append(f"not tried: {in_words(_difference(setting, settings[0]))}: {error}")
                del named[name]
        if str(settings[0]) not in named:
            raise self._stop("the present setting failed: nothing can be compared with it")
        best = min(firsts.values())
        left = [name for name in named if firsts[name] < HOPELESS * best or named[name] is settings[0]]
        seconds = self._interleave({name: named[name] for name in left}, SEARCH_ROUNDS)
        return [(named[name], paired_ratio(seconds[name], seconds[left[0]])) for name in left]

    def _interleave(self, named: Mapping[str, Setting], rounds: int) -> dict[str, list[float]]:
        def seconds(name: str) -> float:
            try:
                return self._turn(named[name], name).epoch_s(self._steps)
            except NoTurn as error:
                raise self._stop(f"{in_words(named[name])} failed in the middle of the comparison: {error}") from error

        variants = {name: functools.partial(seconds, name) for name in named}
        return interleave(variants, rounds, warmup=0, after_round=lambda: time.monotonic() > self._ends)

    def _best_number(self, now: Setting) -> Setting:
        """The setting with the fewest workers of those that are as fast as the best; the present one, if it is."""
        cores = usable_cores()
        numbers = [n for n in range(cores + 1) if n <= 2 or n == cores or n & (n - 1) == 0]
        ranked = self._screen([now, *(self._workers(now, n) for n in numbers if n != now["num_workers"])])
        lowest = min(ratio.median for _, ratio in ranked)
        as_fast = [setting for setting, ratio in ranked if ratio.median <= (1 + NOISE) * lowest]
        return now if now in as_fast else min(as_fast, key=lambda setting: setting["num_workers"])

    def _others(self, best: Setting) -> list[Setting]:
        """Settings that differ in one thing from the best number of workers and are faster, and all of them together."""
        candidates = [candidate for candidate in self._changes(best) if candidate != best]
        if not candidates:
            return []
        self._ends = time.monotonic() + self._seconds / 2
        _, *ranked = self._screen([best, *candidates])
        helps = sorted((one for one in ranked if one[1].high * LEAST_GAIN < 1), key=lambda one: one[1].median)
        if self._late() and not any("fetch_threads" in setting for setting, _ in helps):
            helps += self._more_workers(best)
        together = dict(best)
        for setting, _ in reversed(helps):  # the best last: it decides where two contradict each other
            together |= _difference(setting, best)
        if together.get("whole_batches"):
            together.pop("fetch_threads", None)
        if not together["num_workers"]:
            together = {name: together[name] for name in together if name in ALWAYS}
        return [setting for setting, _ in helps[:1]] + ([together] if len(helps) > 1 else [])

    def _more_workers(self, best: Setting) -> list[tuple[Setting, Spread]]:
        """More workers than cores, as long as twice as many help: they wait for something else than a core."""
        helps: list[tuple[Setting, Spread]] = []
        while best["num_workers"] < MOST_WORKERS:
            _, *more = self._screen([best, self._workers(best, 2 * max(1, best["num_workers"]))])
            if not more or more[0][1].high * LEAST_GAIN > 1:
                break
            helps, best = more, more[0][0]
        return helps

    def _changes(self, best: Setting) -> Iterator[Setting]:
        facts, workers = self._facts, best["num_workers"]
        if workers:
            yield {**best, "persistent_workers": True}
            yield {**best, "prefetch_factor": 2 * best["prefetch_factor"]}
            yield {**best, "in_order": False}
            if facts["one_thread"]:
                yield {**best, "one_thread": True}
            turn = self._turns[str(best)][-1]
            starting = self._steps * turn.step_s * STARTING < turn.waits[0] - turn.step_s * workers
            method = best["multiprocessing_context"]
            if method != "fork" and facts["fork"]:
                yield {**best, "multiprocessing_context": "fork"}
            elif method == "fork" and starting:
                yield {**best, "multiprocessing_context": "forkserver"}
        else:  # workers may have lost by their starts alone
            yield {**self._workers(best, usable_cores()), "persistent_workers": True}
        if facts["threads"] and self._late():
            yield {**best, "fetch_threads": FETCH_THREADS}
        if facts["whole_batches"]:
            yield {**best, "whole_batches": True}
            yield {**self._workers(best, 0), "whole_batches": True}

    def _late(self) -> bool:
        """Whether samples wait for something else than a core: so the turns without workers say."""
        turns = self._turns.get(str({"num_workers": 0}), [])
        return not turns or sum(turn.busy_s for turn in turns) < (1 - LATE) * sum(sum(turn.waits) for turn in turns)

    def _workers(self, setting: Setting, number: int) -> Setting:
        """A setting with another number of workers, and the arguments that only workers have."""
        if not number:
            return {"num_workers": 0}
        method = {"multiprocessing_context": self._facts["start_method"]}
        return {"num_workers": number, **DEFAULTS, **method, **setting} | {"num_workers": number}

    def _confirm(self, now: Setting, candidates: Sequence[Setting]) -> None:
        """Compare the candidates with the present setting in fresh turns, and keep those that help."""
        tried = self._tried
        named = {str(setting): setting for setting in candidates if setting != now}
        for name, setting in named.items():
            if name not in self._turns:
                self._turn(setting)  # starts workers that are kept
        before = {name: len(turns) for name, turns in self._turns.items()}
        self._ends = time.monotonic() + self._seconds / 2
        seconds = self._interleave({str(now): now, **named, SAME: now}, CONFIRM_ROUNDS)
        reference = seconds[str(now)]
        equal = paired_ratio(seconds[SAME], reference)
        noise = max(equal.high, 1 / equal.low)
        steps = 1.0 if math.isinf(self._steps) else self._steps
        gains = {
            name: Gain(
                _difference(setting, now),
                paired_ratio(reference, seconds[name]),
                steps / statistics.median(seconds[name]),
            )
            for name, setting in named.items()
        }
        helpful = [name for name in gains if gains[name].ratio.low > max(LEAST_GAIN, noise)]
        helpful.sort(key=lambda name: gains[name].rate, reverse=True)
        best = (helpful or [str(now)])[0]
        tried.now = steps / statistics.median(reference)
        tried.gains = [gains[name] for name in helpful]
        tried.best, tried.started = self._turns[best][before[best] :], self._turns[best][0]


class _Stopped(Exception):
    """The search has ended before its end; a note says why."""


def _difference(setting: Setting, other: Setting) -> Setting:
    """The arguments in which a setting differs from another one, where those have a meaning."""
    default = {**DEFAULTS, "multiprocessing_context": setting.get("multiprocessing_context")}
    return {name: value for name, value in setting.items() if value != other.get(name, default.get(name))}


def predicted_epoch(tried: Tried, steps: int, first: bool) -> float:
    """Seconds of an epoch with the best setting, see the head of this module.

    :param first: whether it is the first one of the script
    """
    seconds = statistics.fmean(turn.epoch_s(steps) for turn in tried.best)  # a median would forget rare slow samples
    if first and tried.started:
        fresh = tried.started.head_s - statistics.fmean(turn.head_s for turn in tried.best)
        seconds += tried.warm_up_s + (0.0 if tried.best[0].fresh else fresh)
    return seconds


@dataclass
class Check:
    """The epochs of a script with a setting put in from outside.

    :param epochs: for each its steps, and the seconds that were predicted and measured
    """

    setting: Setting
    epochs: list[tuple[int, float, float]] = field(default_factory=list)


def check_best(script: Script, tried: Tried, seconds: float, tell: Callable[[str], object] = print) -> Check:
    """Predict the script's epochs with the best setting, and then run it with this setting put in from outside.

    :param seconds: of an epoch that are measured; of a longer one, its beginning is
    :param tell: gets the prediction before the run begins, and then what was measured
    """
    setting = tried.gains[0].setting if tried.gains else {}
    check, words = Check(setting), in_words(setting) or "the present setting"
    if math.isinf(tried.steps):
        tell(f"predicted with {words}: {statistics.fmean(turn.step_s for turn in tried.best):.4f} s per step")
    else:
        first, later = (predicted_epoch(tried, int(tried.steps), first=first) for first in (True, False))
        tell(
            f"predicted with {words}: {first:.2f} s for the first epoch of {tried.steps:.0f} steps, {later:.2f} s later"
        )
    with contextlib.suppress(ScriptEnded), ScriptRun(script, setting, seconds) as run:
        while len(check.epochs) < CHECKED_EPOCHS:
            epoch = run.receive(seconds + GRACE_S)
            if epoch["steps"] < 2:  # the script has looked at a batch
                continue
            predicted = predicted_epoch(tried, epoch["steps"], first=not check.epochs)
            check.epochs.append((epoch["steps"], predicted, epoch["seconds"]))
            if not epoch["ended"]:
                break
    for steps, predicted, measured in check.epochs:
        tell(f"measured: {measured:.2f} s for {steps} steps, predicted {predicted:.2f} s")
    if not check.epochs:
        tell("measured: nothing, since the script ended before")
    return check
