"""Other settings of a loader, tried on a loader of this program, or within the loop of a script while it trains."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from dataloading.doctor.script_run import PATIENCE_S, Script, ScriptRun
from dataloading.doctor.search import Search, Tried
from dataloading.doctor.watch.settings import Setting, Twins, facts_of
from dataloading.doctor.watch.turn import NoTurn, ScriptEnded, Turn, alone

MOST_RESTARTS = 20  # of a script that ends before all was tried, as Lightning after the epochs that it was given


def try_loader(loader: DataLoader[Any], seconds: float, place: str = "the loader") -> Tried:
    """Try settings on a loader of this program. It takes its turns alone: nothing trains meanwhile.

    :param seconds: that this may take, about
    """
    twins = Twins(loader)

    def take(setting: Setting, batches: int) -> Turn:
        return alone(twins.turn(setting, batches, patience_s=PATIENCE_S))

    return Search(take, facts_of(loader), seconds, place).run()


def try_settings(script: Script, seconds: float) -> Tried:
    """Try settings within the loop of a script, while it trains.

    :param seconds: that this may take, about, after the script has come to its loader
    """
    try:
        with TrialRuns(script) as runs:
            return Search(runs.take, runs.facts, seconds, script.place).run()
    except ScriptEnded as error:
        return Tried(script.place, notes=[f"no setting could be tried: {error}"])


class TrialRuns:
    """Runs of a script whose loader takes turns. The script is run again when it has come to its end, or to that of a schedule."""

    def __init__(self, script: Script) -> None:
        self._script, self._restarts, self._turns = script, 0, 0

    def __enter__(self) -> TrialRuns:
        self._run = ScriptRun(self._script)
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
