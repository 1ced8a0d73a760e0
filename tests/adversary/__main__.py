"""Make the attempts, and count them by verdict.

    python -m tests.adversary                # all
    python -m tests.adversary flags images  # those of two classes

Writes the counts of these classes to table.json and leaves those of the others; the READMEs have their tables from there. Each
attempt that does not come out as told is printed with what came out.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.reporting.atomic_files import write_json
from common.reporting.machine import describe_machine
from tests.adversary.attempt import Attempt, Outcome, Verdict, judge
from tests.adversary.classes import CLASSES, table
from tests.adversary.run import is_missing, run
from tests.adversary.scenes import finished_run
from tests.support.gpus import NO_GPUS

TABLE = Path(__file__).with_name("table.json")
AT_A_TIME = 2


def main() -> None:
    # A shell that starts this in the background has it ignore Ctrl-C, nohup the closing of a terminal; what it starts must not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    os.environ.update(NO_GPUS)  # the attempts mean the CPU
    names = sys.argv[1:] or list(CLASSES)
    finished_run()  # before two attempts want it at once
    results = {name: _count(name, CLASSES[name][1]) for name in names}
    print(table(results))
    before = json.loads(TABLE.read_text())["classes"] if TABLE.exists() else {}
    every = {name: (before | results)[name] for name in CLASSES if name in before | results}
    write_json(TABLE, {"machine": describe_machine(), "classes": every})


def _count(name: str, attempts: list[Attempt]) -> dict[str, Any]:
    """Make the attempts of a class; their number, that of each verdict, and the most that one took."""
    made = [attempt for attempt in attempts if not is_missing(attempt)]
    verdicts: Counter[str] = Counter()
    refusals = []
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        for attempt, outcome in zip(made, threads.map(run, made), strict=True):
            verdict = judge(attempt, outcome)
            verdicts[verdict.value] += 1
            if verdict is not Verdict.AS_TOLD:
                print(f"{name}: {verdict.value}: {describe(attempt, outcome)}\n", flush=True)
            if attempt.status == 2:
                refusals.append(outcome)
    return {
        "attempts": len(made),
        "verdicts": {verdict.value: verdicts[verdict.value] for verdict in Verdict},
        "refusal_s": max((round(outcome.seconds, 1) for outcome in refusals), default=None),
        "refusal_mb": max((round(outcome.bytes / 1e6) for outcome in refusals), default=None),
    }


def describe(attempt: Attempt, outcome: Outcome) -> str:
    """What was done, what must come out, and what came out."""
    return (
        f"{attempt.command} {attempt.ranks or ''} {dict(attempt.env) or ''}\n"
        f"  must end with {attempt.status} and match {attempt.line!r}\n"
        f"  ended with {outcome.statuses} after {outcome.seconds:.1f} s and {outcome.bytes / 1e6:.0f} MB; "
        f"changed {outcome.changed}, made {outcome.made}, left {outcome.left}\n"
        f"  stdout: {outcome.stdout[-1000:]}\n  stderr: {outcome.stderr[-3000:]}"
    )


if __name__ == "__main__":
    main()
