"""The first failure of a job, as far as its log tells it: the rank, the error, the line in the user's code, and what only follows from it.

The evidence counts in this order: exceptions that no other process has caused; torchrun's own end; deaths by signals; NCCL's watchdogs; ranks
that waited for others; and exit codes alone, which say that the cause is not in the log.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from ddp.launch.log.errors import DISAGREE, LOST, STOPPED, SUMMARY, WAITED, Error
from ddp.launch.log.evidence import Evidence
from ddp.launch.log.exit_codes import code_of, described, signal_of
from ddp.launch.log.verdict import BLOCKING, DETAIL, FAULTHANDLER, LOGS, RECORD, RECORDER, STACKS, Verdict
from ddp.launch.ranks import listed

SAME_END = 100  # lines: errors without ranks that are nearer belong to the same end of a job
LONGEST_CAUSE = 500
# Messages that name the ranks to blame.
NAMED_RANKS = re.compile(
    r"Rank (\d+) is running collective: .*?, ?but Rank (\d+) is running|[Rr]anks? ([\d, ]+?) failed to pass monitoredBarrier"
    r"|same model across all ranks, but Rank (\d+) has .*? rank (\d+) has"
)
ASYNCHRONOUS = re.compile(r"CUDA error: (?!out of memory|invalid device ordinal|no kernel)|device-side assert")
CUDA_MEMORY = re.compile(
    r"Tried to allocate (?P<asked>[\d.]+ \w+).*?total capacity of (?P<all>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free"
)


def judge(evidence: Evidence) -> Verdict | None:
    """The first failure; None if the log has none."""
    judges: tuple[Callable[[Evidence], Verdict | None], ...] = (
        _exception,
        _end_of_torchrun,
        _signal,
        _watchdog,
        _waiting,
        _rest,
    )
    return next((verdict for one in judges if (verdict := one(evidence)) is not None), None)


def consequences(evidence: Evidence) -> list[str]:
    """A line for each error and exit code that only follows from the first failure."""
    lines = [f"{described_error(error)}: {error.consequence}" for error in evidence.errors if error.consequence]
    codes = evidence.codes.items()
    return lines + [
        f"rank {rank}, exit code {code}: {why}" for rank, code in codes if (why := _reason(evidence, rank, code))
    ]


def described_error(error: Error) -> str:
    who = "" if error.rank is None else f"rank {error.rank}, "
    return f"{who}{error}"[:200] + (f" (at {error.place})" if error.place and not error.of_agent else "")


def _reason(evidence: Evidence, rank: int, code: int) -> str:
    """The reason why a signal ended a rank only after another rank's failure, if it did."""
    name, facts = signal_of(code), evidence.facts
    if name == "SIGTERM" and facts["ended"]:
        return "torchrun ended it by SIGTERM after the first failure"
    if name == "SIGKILL" and facts["forced"]:
        return "torchrun killed it, since it had not ended 30 s after SIGTERM"
    if name in ("SIGTERM", "SIGKILL") and facts["tasks"] and rank != next(iter(evidence.codes)) and not facts["memory"]:
        return "srun ended it after the first failure"
    if name == "SIGABRT" and (evidence.watchdogs.calls or evidence.watchdogs.stuck):
        return "NCCL's watchdog ended it, since it had waited for too long"
    if name == "SIGABRT" and any(error.by_signal for error in _lost(evidence)):
        return "the data of another rank did not fit its call"
    return ""


def _own_signals(evidence: Evidence) -> dict[int, int]:
    return {
        rank: code for rank, code in evidence.codes.items() if signal_of(code) and not _reason(evidence, rank, code)
    }


def _failed(evidence: Evidence) -> set[int]:
    """The ranks that ended with an error, and not by a signal."""
    return {rank for rank, code in evidence.codes.items() if not signal_of(code)}


def _lost(evidence: Evidence) -> list[Error]:
    """The errors of ranks that others have caused."""
    return [error for error in evidence.errors if error.consequence not in ("", SUMMARY) and not error.of_agent]


def _own(evidence: Evidence) -> list[Error]:
    """The errors that no other process has caused, from the first one on."""
    found = [
        error for error in evidence.errors if not (error.consequence or error.origin == "ignored" or error.of_agent)
    ]
    return sorted(found, key=lambda error: error.last)


def _ends(evidence: Evidence) -> list[Error]:
    """By rank, the error that ended it, if no other process has caused that."""
    own = _own(evidence)
    unnamed = [error for error in own if error.rank is None]
    found = [
        next(error for error in unnamed if end.last - error.last <= SAME_END and error.file == end.file)
        for end in unnamed[-1:]
    ]
    for rank in {error.rank for error in own} - {None}:
        end = max(
            (error for error in evidence.errors if error.rank == rank),
            key=lambda error: (error.origin in ("", "worker"), error.last),
        )
        found += [end] * (end in own and end.origin in ("", "worker"))
    return found


def _exception(evidence: Evidence) -> Verdict | None:
    ends = _ends(evidence)
    found = ends or _own(evidence)
    root = next(iter(evidence.codes), None)
    if not found or (root in _own_signals(evidence) and not {root, None} & {error.rank for error in found}):
        return None
    one_file = len({error.file for error in found}) == 1
    first = min(found, key=lambda error: (error.last if one_file else error.rank != root, error.last))
    outside = evidence.facts["scheduler"] or evidence.facts["outside"]
    if outside and not _failed(evidence) and evidence.ends[first.file] - first.last > SAME_END:
        return None  # the job went on after it
    alike = [error for error in found if (error.kind, error.place) == (first.kind, first.place)]
    ranks = {error.rank for error in alike if error.rank is not None}
    failed = {*_own_signals(evidence)} if first.by_signal else _failed(evidence)
    if not ranks and len(alike) == len(found) and (len(failed) == 1 or not _lost(evidence)):
        ranks = failed
    notes = {"": [], "worker": ["from a worker process of its DataLoader"]}.get(
        first.origin, [f"in {first.origin}, a thread that ended: the rank went on without it"]
    )
    notes += [f"raised while {first.handled} was handled"] * bool(first.handled)
    notes += [f"it became {first.became}"] * bool(first.became)
    notes += [f"after it, or independent of it: {described_error(error)}" for error in found if error not in alike]
    notes += [f"in {first.file}"] * (len(evidence.ends) > 1)
    asynchronous = ASYNCHRONOUS.search(first.message)
    notes += [line.text.strip() for line, _ in evidence.facts["abort"][:1] if asynchronous]
    if memory := CUDA_MEMORY.search(first.message):
        notes.append(f"it asked for {memory['asked']} where {memory['free']} of the GPU's {memory['all']} were free")
    advice = (LOGS,) * (not ranks) + (BLOCKING,) * bool(asynchronous)
    # An error after which the rank went on may have been handled, and a job that was ended from outside may have had none.
    ended = evidence.codes or _lost(evidence) or evidence.ends[first.file] - first.last < SAME_END
    notes += [line.text.strip() for line, _ in outside[:1]]
    certain = bool(ends and ended and not outside) and (one_file or len(alike) == len(found))
    return Verdict(str(first), tuple(sorted(ranks)), first.place, certain, tuple(notes), advice)


def _end_of_torchrun(evidence: Evidence) -> Verdict | None:
    for _, found in evidence.facts["scheduler"]:
        return Verdict(f"the scheduler ended the job: due to {found['words'].strip().lower()}")
    for _, found in evidence.facts["outside"]:
        cause = f"a signal from outside ended torchrun: {described(-int(found['number']))}"
        return Verdict(cause, message=f"SignalException: Process 1 got signal: {found['number']}")
    for error in evidence.errors:
        if error.of_agent and not error.consequence:
            return Verdict(f"torchrun itself: {error}", message=str(error))
    return None


def _signal(evidence: Evidence) -> Verdict | None:
    """A rank that a signal has ended, without an exception."""
    own, facts = _own_signals(evidence), evidence.facts
    for code in own.values():
        name = signal_of(code)
        if name == "SIGTERM" and facts["cancelled"]:
            return _cancelled(evidence)
        ranks = tuple(sorted(rank for rank in own if own[rank] == code))
        known = {"SIGKILL": facts["memory"], "SIGABRT": facts["abort"]}.get(name, [])
        cause = (
            f"exit code {code}, {name}: " + ("memory ran out" if name == "SIGKILL" else "C++ gave up")
            if known
            else described(code)
        )
        notes = tuple(line.text.strip() for line, _ in known[:2])
        advice = () if name in ("SIGKILL", "SIGTERM") else (FAULTHANDLER,)
        return Verdict(
            cause, ranks, None, bool(known), notes, advice, f"Signal {abs(code) % 128} ({name}) received by PID"
        )
    return None


def _cancelled(evidence: Evidence) -> Verdict | None:
    """SLURM's word that it ended the step, without the reason."""
    for line, _ in evidence.facts["cancelled"][:1]:
        cause = "the step was cancelled: by scancel, or by srun after a task ended"
        return Verdict(cause, certain=False, notes=(line.text.strip(),), message="exitcode: -15")
    return None


def _watchdog(evidence: Evidence) -> Verdict | None:
    judged = evidence.watchdogs.judge(range(max(evidence.ranks, default=-1) + 1))
    if judged is None:
        return None
    return Verdict(
        judged.cause,
        tuple(sorted(judged.ranks)),
        certain=judged.certain,
        notes=tuple(evidence.watchdogs.lines()),
        advice=(RECORDER, STACKS),
        message="Watchdog caught collective operation timeout: WorkNCCL",
    )


def _waiting(evidence: Evidence) -> Verdict | None:
    """Ranks that lost others or waited for them in vain, with nobody's own error: one has gone, or their calls differ."""
    errors = _lost(evidence)
    if not errors:
        return None
    for error in errors:
        if named := NAMED_RANKS.search(str(error)):
            ranks = {int(number) for group in named.groups("") for number in re.findall(r"\d+", group)}
            return Verdict(str(error)[:LONGEST_CAUSE], tuple(sorted(ranks)), error.place, advice=(STACKS,))
    # The first reason in this order says most.
    first = min(errors, key=lambda error: ((DISAGREE, WAITED, LOST, STOPPED).index(error.consequence), error.last))
    everyone = {*evidence.ranks, *evidence.codes}
    here = {error.rank for error in errors if error.rank is not None}
    missing = everyone - here if here else set()
    absent, present = listed(missing) if missing else "another rank", listed(here) if here else "others"
    place = next((error.place for error in [first, *errors] if error.place), None)
    silent = {*missing} & {*_failed(evidence), *_own_signals(evidence)}
    if first.consequence == STOPPED:
        cause = str(first)
    elif first.consequence == DISAGREE:
        cause, missing = (
            "the ranks' calls do not fit together: another order, shape or dtype, or one is left out",
            everyone,
        )
    elif silent:
        cause = f"{described(evidence.codes[min(silent)])}; the log does not say why"
    elif not missing and len({error.place for error in errors}) > 1:
        cause, missing = (
            "the ranks were in different calls, one of which was skipped or comes in another order",
            everyone,
        )
    elif first.consequence == WAITED:
        cause = f"{absent} did not come to the call in which {present} waited"
    else:
        cause = f"{absent} ended without an error of its own while {present} waited: it left a loop sooner, returned, or called sys.exit(0)"
    certain = first.consequence in (DISAGREE, STOPPED)
    return Verdict(
        cause, tuple(sorted(missing)), place, certain, tuple(map(described_error, errors)), (DETAIL, STACKS), str(first)
    )


def _rest(evidence: Evidence) -> Verdict | None:
    """A program that did not start, a message without a traceback, or only an exit code: then the cause is not in the log."""
    facts, ranks = evidence.facts, tuple(sorted(_failed(evidence)))
    for _, found in facts["usage"][-1:]:
        return Verdict((found["words"] or found["start"]).strip(": "), ranks)
    for line in [line for line, _ in facts["abort"][:1]] + evidence.tracebacks.loose[:1]:
        return Verdict(
            line.text.strip()[:LONGEST_CAUSE],
            () if line.rank is None else (line.rank,),
            None,
            False,
            advice=(RECORD, LOGS),
        )
    for rank, code in evidence.codes.items():
        cause = f"the cause is not in this log; torchrun saw this rank end first: {described(code)}"
        return Verdict(
            cause, (rank,), None, False, advice=(RECORD, LOGS), message="ChildFailedError exitcode error_file"
        )
    ends = [(line, end) for line, found in facts["shell"][:1] if (end := code_of(found["words"])) is not None]
    if facts["memory"] and all(end == -signal.SIGKILL for _, end in ends):
        notes = tuple(line.text.strip() for line, _ in facts["memory"][:2])
        return Verdict("memory ran out, and a process was killed", notes=notes, message="exitcode: -9")
    for line, code in ends:
        advice = (LOGS,) if signal_of(code) in ("", "SIGKILL", "SIGTERM") else (FAULTHANDLER,)
        note = line.text.strip()[:LONGEST_CAUSE]
        return Verdict(described(code), (), None, False, (note,), advice, f"exitcode: {code}")
    return _cancelled(evidence)
