"""Which settings of a loader help, measured: on its own data set, in turns, and for a script within the script's own loop.

The search goes coordinate by coordinate. First come numbers of workers, then the other arguments at the best number. A few turns
leave out what is clearly slower; what is left is compared with the present setting in fresh turns, whose paired ratios are
printed. The present setting takes part in them twice. Its ratio with itself says how much two equal settings differ here, and
only what gains more than that is called a gain.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.benchmarking.other_work import OtherWork
from common.benchmarking.timing import NOISE, Spread, interleave, paired_ratio
from common.machine import usable_cores
from dataloading.dataset.batches import FETCH_THREADS
from dataloading.doctor.watch.settings import Setting
from dataloading.doctor.watch.turn import NoTurn, ScriptEnded, Turn
from dataloading.loader.stock_loader import worker_numbers

LEAST_GAIN = 1.05
HOPELESS = 1.5  # times as slow as the best in its first turn: no further turns
MANY_WORKERS = 16  # for late samples that cannot be fetched in threads
LATE = 0.5  # share of a sample's time in which no core worked on it: it is late, and threads may help
SEARCH_ROUNDS, CONFIRM_ROUNDS = 3, 5
TURN_S = 0.3, 2.0  # the shortest and longest of a turn's steady part
DEFAULTS: Setting = {
    "prefetch_factor": 2,
    "persistent_workers": False,
    "in_order": True,
}  # of arguments that need workers
PHASES = 3  # the numbers of workers, the other arguments, the comparison
SAME = "the present setting, again"
ON_EACH_WORKER = "each worker iterates over the whole data set, unless it asks get_worker_info()"


@dataclass(frozen=True)
class Gain:
    """A setting that helps.

    :param setting: what differs from the present one
    :param ratio: times as many batches/s as with the present setting: those of an epoch, with the start of its workers
    """

    setting: Setting
    ratio: Spread

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
    :param notes: what could not be tried, and why; what to know of a gain; how much other programs used the cores
    """

    place: str
    gains: list[Gain] = field(default_factory=list)
    now: float = 0.0
    steps: float = math.inf
    best: list[Turn] = field(default_factory=list)
    started: Turn | None = None
    warm_up_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """For the terminal."""
        lines = [f"{self.place}: {gain}" for gain in self.gains]
        if self.now and not lines:
            lines = [f"{self.place}: no setting that was tried helps: {self.now:.1f} batches/s"]
        return lines + self.notes


def in_words(setting: Setting) -> str:
    """A setting as it is written into the call of ``DataLoader``."""
    special = {
        "fetch_threads": f"threads: ThreadedFetch(dataset, {setting.get('fetch_threads')}) of dataloading/dataset/batches.py",
        "gc_freeze": "in worker_init_fn: gc.freeze()",
        "one_thread": "in worker_init_fn: torch.set_num_threads(1) and cv2.setNumThreads(0)",
        "whole_batches": "whole batches: sampler=BatchSampler(sampler, batch_size, drop_last), batch_size=None",
    }
    return ", ".join(special.get(name) or f"{name}={value!r}" for name, value in setting.items())


class Search:
    """Turns of many settings, and what they tell.

    :param take: a turn with a setting of so many batches
    :param facts: of the loader, see ``facts_of``
    :param seconds: that the search may take, about
    """

    def __init__(
        self,
        take: Callable[[Setting, int], Turn],
        facts: Mapping[str, Any],
        seconds: float,
        place: str,
    ) -> None:
        self._take, self._facts, self._steps = take, facts, facts["length"] or math.inf
        self._seconds, self._batches = seconds, 4
        self._turns: dict[str, list[Turn]] = {}
        self._tried = Tried(place, steps=self._steps)
        self._begin_phase()

    def run(self) -> Tried:
        tried, others = self._tried, OtherWork()
        now: Setting = self._facts["present"]
        try:
            first = self._turn(now)
            tried.warm_up_s = max(0.0, sum(first.uses) - len(first.uses) * statistics.median(first.uses))
            least, most = TURN_S
            aim = min(most, max(least, self._seconds / 70))
            self._batches = max(2 * now["num_workers"], 4, min(500, round(aim / first.step_s)))
            best = self._best_number(now)
            self._confirm(now, [best, *self._others(best)])
        except (NoTurn, ScriptEnded) as error:
            tried.notes.append(f"{'not all settings' if self._turns else 'no setting'} could be tried: {error}")
        if doubt := others.doubt():
            tried.notes.append(doubt)
        return tried

    def _begin_phase(self) -> None:
        self._ends = time.monotonic() + self._seconds / PHASES  # deadline of the current phase

    def _turn(self, setting: Setting, name: str = "") -> Turn:
        workers = max(1, setting["num_workers"])
        turn = self._take(setting, max(1, self._batches // workers) * workers)
        self._turns.setdefault(name or str(setting), []).append(turn)
        return turn

    def _screen(self, settings: Sequence[Setting]) -> list[tuple[Setting, Spread]]:
        """Settings in turns; for each that is not hopeless, the ratio of its seconds to the first one's, which is one of them."""
        named = {str(setting): setting for setting in settings}
        firsts = self._first_turns(settings, settings[0])
        if str(settings[0]) not in firsts:
            raise NoTurn(f"{in_words(settings[0])} failed: nothing can be compared with it")
        best = min(firsts.values())
        left = [name for name in firsts if firsts[name] < HOPELESS * best or named[name] is settings[0]]
        seconds = self._interleave({name: named[name] for name in left}, SEARCH_ROUNDS)
        return [(named[name], paired_ratio(seconds[name], seconds[left[0]])) for name in left]

    def _first_turns(self, settings: Iterable[Setting], present: Setting) -> dict[str, float]:
        """Seconds of an epoch by a first turn of each setting. One that fails is left out, and so are those for which no time is left."""
        firsts: dict[str, float] = {}
        for setting in settings:
            words = in_words(_difference(setting, present) or setting)
            try:
                if firsts and time.monotonic() > self._ends:
                    raise NoTurn("no time was left")
                firsts[str(setting)] = self._turn(setting).epoch_s(self._steps)
            except NoTurn as error:
                self._tried.notes.append(f"not tried: {words}: {error}")
        return firsts

    def _interleave(self, named: Mapping[str, Setting], rounds: int) -> dict[str, list[float]]:
        def seconds(name: str) -> float:
            return self._turn(named[name], name).epoch_s(self._steps)

        variants = {name: functools.partial(seconds, name) for name in named}
        return interleave(variants, rounds, warmup=0, after_round=lambda: time.monotonic() > self._ends)

    def _best_number(self, now: Setting) -> Setting:
        """The setting with the fewest workers of those that are as fast as the best; the present one, if it is."""
        numbers = worker_numbers(usable_cores(), every_to=2)
        ranked = self._screen([now, *(self._workers(now, n) for n in numbers if n != now["num_workers"])])
        lowest = min(ratio.median for _, ratio in ranked)
        as_fast = [setting for setting, ratio in ranked if ratio.median <= (1 + NOISE) * lowest]
        return now if now in as_fast else min(as_fast, key=lambda setting: setting["num_workers"])

    def _others(self, best: Setting) -> list[Setting]:
        """The fastest setting that differs in one thing from the best number of workers, and it with all others that are faster."""
        self._begin_phase()
        _, *ranked = self._screen([best, *(candidate for candidate in self._changes(best) if candidate != best)])
        helps = [one for one in ranked if one[1].high * LEAST_GAIN < 1]
        if not helps:
            return []
        fastest, _ = min(helps, key=lambda one: one[1].median)
        together = dict(fastest)
        for setting, _ in helps:
            if setting["num_workers"] == fastest["num_workers"]:
                together |= _difference(setting, best)
        if together.get("whole_batches"):
            together.pop("fetch_threads", None)
        return [fastest, together]

    def _changes(self, best: Setting) -> Iterator[Setting]:
        facts = self._facts
        if best["num_workers"]:
            yield {**best, "persistent_workers": True}
            yield {**best, "prefetch_factor": 2 * best["prefetch_factor"]}
            yield {**best, "in_order": False}
            yield {**best, "gc_freeze": True}
            yield {**best, "one_thread": True}
        else:  # workers may have lost by their starts alone
            yield {**self._workers(best, usable_cores()), "persistent_workers": True}
        if self._late():
            yield {**best, "fetch_threads": FETCH_THREADS} if facts["threads"] else self._workers(best, MANY_WORKERS)
        if facts["whole_batches"]:
            yield {**best, "whole_batches": True}
            yield {**self._workers(best, 0), "whole_batches": True}

    def _late(self) -> bool:
        """Whether samples wait for something else than a core, as far as turns without workers tell."""
        turns = self._turns.get(str({"num_workers": 0}), [])
        return sum(turn.busy_s for turn in turns) < (1 - LATE) * sum(sum(turn.waits) for turn in turns)

    def _workers(self, setting: Setting, number: int) -> Setting:
        """A setting with another number of workers, and the arguments that only workers have."""
        if not number:
            return {"num_workers": 0}
        return {"num_workers": number, **DEFAULTS, **setting} | {"num_workers": number}

    def _confirm(self, now: Setting, candidates: Sequence[Setting]) -> None:
        """Compare the candidates with the present setting in fresh turns, and keep those that help."""
        tried = self._tried
        self._begin_phase()
        new = [setting for setting in candidates if str(setting) not in self._turns]
        self._first_turns(new, now)  # starts workers that are kept
        named = {str(setting): setting for setting in candidates if setting != now and str(setting) in self._turns}
        before = {name: len(turns) for name, turns in self._turns.items()}
        seconds = self._interleave({str(now): now, **named, SAME: now}, CONFIRM_ROUNDS)
        reference = seconds[str(now)]
        equal = paired_ratio(seconds[SAME], reference)
        noise = max(equal.high, 1 / equal.low)
        steps = 1.0 if math.isinf(self._steps) else self._steps
        gains = {
            name: Gain(_difference(setting, now), paired_ratio(reference, seconds[name]))
            for name, setting in named.items()
        }
        helpful = [name for name in gains if gains[name].ratio.low > max(LEAST_GAIN, noise)]
        helpful.sort(key=lambda name: gains[name].ratio.median, reverse=True)
        best = (helpful or [str(now)])[0]
        tried.now = steps / statistics.median(reference)
        tried.gains = [gains[name] for name in helpful]
        if self._facts["iterable"] and any(named[name]["num_workers"] > max(1, now["num_workers"]) for name in helpful):
            tried.notes.append(ON_EACH_WORKER)
        tried.best, tried.started = self._turns[best][before[best] :], self._turns[best][0]


def _difference(setting: Setting, other: Setting) -> Setting:
    """The arguments in which a setting differs from another one, where those have a meaning."""
    return {name: value for name, value in setting.items() if value != other.get(name, DEFAULTS.get(name))}
