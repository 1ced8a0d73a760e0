"""Hold the doctor's predictions against what a second run measures, on the slow scripts. A command, since it wants idle cores.

    python -m tests.dataloading.doctor.predictions [NAME ...]

Where no setting helps, the best of those that were tried is put in, and its time must be as predicted, too: it does not help.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.benchmarking.timing import Spread
from dataloading.doctor.check import check_best
from dataloading.doctor.examine import DoctorConfig, examine, launch
from dataloading.doctor.script_run import Script
from dataloading.doctor.search import Gain, Search, Tried, in_words
from dataloading.doctor.trials import TrialRuns
from dataloading.doctor.watch.turn import Turn
from tests.dataloading.doctor.cases import CASES, copy_scripts, make_data

CONFIG = DoctorConfig(seconds=15.0, device="cpu")


def predictions(command: list[str]) -> Iterator[str]:
    """A line for each loader that training waits for."""
    arguments, environment, watches = launch(CONFIG, command)
    for loader in examine(CONFIG, command, lambda _: None).loaders:
        if not (loader.matters and loader.line):
            continue
        script = Script(arguments, environment, loader.line, tuple(watches))
        with TrialRuns(script) as runs:
            search = Search(runs.take, runs.facts, CONFIG.trials, script.place)
            tried = search.run()
        helps = bool(tried.gains)
        if not helps:
            tried.gains, tried.best, tried.started = _next_best(search, tried, runs.facts["present"])
        now = [measured for steps, measured in loader.epochs() if steps > 1]
        for number, (steps, predicted, measured) in enumerate(
            check_best(script, tried, CONFIG.seconds, lambda _: None)
        ):
            yield (
                f"{'helps' if helps else 'no gain':8}{in_words(tried.gains[0].setting):52}{tried.gains[0].ratio.median:6.2f}x  "
                f"epoch {number + 1} of {steps} steps: predicted {predicted:.2f} s, measured {measured:.2f} s "
                f"({predicted / measured - 1:+.0%}); as it is {now[min(number, len(now) - 1)]:.2f} s"
            )


def _next_best(search: Search, tried: Tried, present: dict[str, object]) -> tuple[list[Gain], list[Turn], Turn]:
    """The best setting that was tried beside the present one, its turns and its first one."""
    seconds = {
        name: statistics.fmean(turn.epoch_s(tried.steps) for turn in turns) for name, turns in search._turns.items()
    }
    others = [name for name in seconds if name[0] == "{" and ast.literal_eval(name) != present]
    best = min(others, key=seconds.__getitem__)
    ratio = seconds[str(present)] / seconds[best]
    turns = search._turns[best]
    return [Gain(ast.literal_eval(best), Spread(ratio, ratio, ratio))], turns[1:] or turns, turns[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_scripts(folder)
        make_data(folder)
        os.chdir(folder)
        for case in CASES:
            if importlib.util.find_spec(case.needs) and (not sys.argv[1:] or case.name in sys.argv[1:]):
                for line in predictions(shlex.split(case.command)) if case.cause else ():
                    print(f"{case.name:22}{line}", flush=True)


if __name__ == "__main__":
    main()
