"""Runs checks on real ranks, one after another, and survives those that fail, crash or hang.

A group of ranks runs all checks. After a check that did not pass, its ranks may still wait in a collective, or answer it too
late, which would disturb the next check: they are killed, and the next check gets new ones. Ranks that have all come to the end,
or to something that the wrapper does not offer, go on to the next check.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddp.conformance.checks as checks
from common.command_line.functions import import_function
from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from ddp.conformance.check import CHECKS, Check, Wrap, Wrong
from ddp.rendezvous.worker_group import WorkerGroup, preload

ECHO_S = 1.0  # for the ranks that wait for one that has failed
START_S = 60.0  # a collective's time limit is longer than a check's: the check's must end it
PASS, NOT_OFFERED, WRONG, REFUSED, HUNG = STATUSES = ("pass", "not offered", "wrong", "refused", "hung")
FAILED = (WRONG, REFUSED, HUNG)
METHODS = ("no_sync", "register_comm_hook", "join", "join_hook")  # a wrapper may offer them, or not

preload("torch._dynamo", "torch.distributed.optim", checks.__name__, __name__)


@dataclass(frozen=True)
class Answer:
    """One rank's answer to a check.

    :param status: one of STATUSES, but not ``hung``
    :param message: one line, for a check that did not pass
    :param trace: the traceback
    """

    status: str
    message: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Result:
    """The result of a check.

    :param ranks: how many ranks ran it
    :param status: one of STATUSES
    :param message: for a check that did not pass: the first failed rank's words, or the ranks that hung
    :param seconds: it took
    :param answers: of the ranks that answered, by rank
    """

    check: str
    topic: str
    ranks: int
    status: str
    message: str = ""
    seconds: float = 0.0
    answers: dict[int, Answer] = field(default_factory=dict)


class Runner:
    """The ranks on which checks run; to be closed. They start with the first check, and again after those that have spoiled them.

    :param ranks: how many
    :param time_limit_s: seconds for each check
    :param logs: folder for what the ranks print, ``rank<r>-of-<n>.log``; None drops it
    """

    def __init__(self, ranks: int, time_limit_s: float = 20.0, logs: Path | None = None) -> None:
        self._ranks, self._time_limit_s, self._logs = ranks, time_limit_s, logs
        self._group: WorkerGroup | None = None

    def run(self, check: Check, wrapper: str) -> Result:
        """Run one check.

        :param wrapper: ``module:Class``
        :raises UsageError: when it cannot be imported on the ranks
        """
        began = time.monotonic()
        answers = self._answers(check, wrapper)
        status, message = verdict(answers, self._ranks, self._time_limit_s)
        if option := re.fullmatch(r"rank 0: no option (\w+)", message):  # the check may be about something else
            again = verdict(self._answers(check, wrapper, option[1]), self._ranks, self._time_limit_s)
            message += f"; without it: {': '.join(filter(None, again))}"
        return Result(check.name, check.topic, self._ranks, status, message, time.monotonic() - began, answers)

    def _answers(self, check: Check, wrapper: str, without: str | None = None) -> dict[int, Answer]:
        if self._group is None:
            timeout_s = START_S + 2 * self._time_limit_s
            self._group = WorkerGroup(self._ranks, ChecksOnOneRank, self._logs, threads=1, timeout_s=timeout_s)
        self._group.start("run", check.name, wrapper, without)
        answers = self._finish()
        if self._group is not None:
            self._group.start("settle", check.name)
            settled = self._finish()
            if self._group is None:
                answers = settled
        return answers

    def _finish(self) -> dict[int, Answer]:
        """The answers; without a group afterwards, if its ranks have been killed."""
        assert self._group is not None
        results = self._group.finish_within(self._time_limit_s, _spoils_the_ranks, ECHO_S)
        answers = {
            rank: Answer(REFUSED, one_line(str(result)), str(result)) if isinstance(result, RuntimeError) else result
            for rank, result in results.items()
        }
        if len(answers) < self._ranks or any(map(_spoils_the_ranks, answers.values())):
            self._group = None
        return answers

    def close(self) -> None:
        """End the ranks."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None and self._group is not None:  # do not wait for ranks that may hang
            group, self._group = self._group, None
            group.__exit__(kind, error, at)
        self.close()


class ChecksOnOneRank:
    """The service of one rank."""

    def __init__(self, env: DistEnv, logs: Path | None) -> None:
        self._checks = {check.name: check for check in CHECKS}
        gc.freeze()  # torch's own objects are so many that looking through them takes longer than most checks
        path = Path(os.devnull) if logs is None else logs / f"rank{env.rank}-of-{env.world_size}.log"
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):  # torch's C++ code writes to the descriptors
            os.dup2(log, stream)
        os.close(log)

    def run(self, name: str, wrapper: str, without: str | None) -> Answer:
        """Run one check on this rank, and tell what came of it.

        :param without: an option that the wrapper is not given
        """
        own = load(wrapper)

        def wrap(module: nn.Module, **options: Any) -> Any:
            return own(module, **{name: value for name, value in options.items() if name != without})

        with self._answered() as answer:
            torch.manual_seed(0)
            self._checks[name].run(wrap)
        gc.collect()  # a wrapper is often part of a cycle, and its hooks must not meet the next check
        return answer[0]

    def settle(self, name: str) -> Answer:
        """Find collectives that a check has left over on some ranks: the next one then meets the wrong partner."""
        with self._answered() as answer:
            names: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(names, name)
            if set(names) != {name}:
                raise Wrong("the ranks have not called the same collectives")
        return answer[0]

    @contextlib.contextmanager
    def _answered(self) -> Iterator[list[Answer]]:
        """A block whose error becomes the answer."""
        answer = [Answer(PASS)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield answer
            except Wrong as error:
                answer[0] = Answer(WRONG, one_line(str(error)), traceback.format_exc())
            except (Exception, SystemExit) as error:
                feature = lacking(error)
                status = REFUSED if feature is None else NOT_OFFERED
                answer[0] = Answer(status, feature or described(error), traceback.format_exc())


def _spoils_the_ranks(answer: Answer) -> bool:
    """Whether other ranks may wait for the one that answers. What is not offered is so on all of them."""
    return answer.status in FAILED


def verdict(answers: dict[int, Answer], ranks: int, time_limit_s: float) -> tuple[str, str]:
    """The status of a check and its message, from the ranks' answers. A wrong value comes before an error: when a rank
    leaves a collective because of it, others see an error. A feature that is missing on one rank alone is a failure."""
    failed = {rank: answer for rank, answer in answers.items() if answer.status != PASS}
    missing = [rank for rank in range(ranks) if rank not in answers]
    if failed:
        rank = min(failed, key=lambda rank: (failed[rank].status != WRONG, _is_echo(failed[rank]), rank))
        status, message = failed[rank].status, failed[rank].message
        if status == NOT_OFFERED and any(rank not in failed for rank in range(ranks)):
            status = REFUSED
        waiting = f"; {named(missing)} waited in vain" if missing else ""
        return status, (message if message.startswith("rank ") else f"rank {rank}: {message}") + waiting
    if missing:
        rest = [rank for rank in range(ranks) if rank in answers]
        said = f"; {named(rest)} passed" if rest else ""
        return HUNG, f"{named(missing)} did not answer within {time_limit_s:g} s{said}"
    return PASS, ""


def _is_echo(answer: Answer) -> bool:
    """Whether it may be no more than what a rank sees of another one's end."""
    return any(words in answer.message for words in ("gloo", "Connection", "connection", "Timed out"))


def named(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0 and 1``."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def lacking(error: BaseException) -> str | None:
    """The feature that the wrapper does not offer, if that is why it raised the error."""
    text = str(error)
    if option := re.search(r"unexpected keyword argument '(\w+)'", text):
        return f"no option {option[1]}"
    if (method := re.search(r"has no attribute '(\w+)'", text)) and method[1] in METHODS:
        return f"no method {method[1]}"
    if isinstance(error, NotImplementedError):
        return one_line(text) or "NotImplementedError"
    return None


def described(error: BaseException) -> str:
    """An error in one line; one without words by where it was raised."""
    text = str(error)
    if not text:
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{at.filename}:{at.lineno}: {at.line}"
    return one_line(f"{type(error).__name__}: {text}")


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.split())


@functools.cache
def load(wrapper: str) -> Wrap:
    """The class that ``module:Class`` names.

    :raises UsageError: if there is none, or it cannot be called with a module
    """
    if not all(wrapper.partition(":")):
        raise UsageError(f"{wrapper}: name the wrapper as module:Class, mypackage.mymodule:MyDDP for example")
    return import_function("wrapper", wrapper, "wrap(module, **options)", (nn.Identity(),))


def selected(words: Sequence[str]) -> list[Check]:
    """The checks whose name or topic contains one of the words; all for no words.

    :raises UsageError: for a word that is in none
    """
    for word in words:
        if not any(_has(check, word) for check in CHECKS):
            raise UsageError(f"--only {word}: no check has that in its name or topic (--list shows them)")
    return [check for check in CHECKS if not words or any(_has(check, word) for word in words)]


def _has(check: Check, word: str) -> bool:
    return word.replace("_", " ").lower() in f"{check.topic}: {check.name}".lower()
