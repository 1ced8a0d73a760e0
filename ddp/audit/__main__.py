"""Says whether a training script does distributed training right: any script, unchanged.

    python -m ddp.audit -- train.py --epochs 2               # on two CPU ranks
    python -m ddp.audit --ranks 3 --json audit.json -- -m package.module

The script runs as torchrun starts it, or by itself if it starts its own processes. It is watched from within: what each rank computes,
sends, steps, reads and writes. What is wrong is printed, a line for each thing: where in the script, the numbers that prove
it, what to do, and the chapter that explains it. A run of some ten steps and two epochs, with a checkpoint if there are any, is enough.

The exit status is 1 if something is wrong, 0 if nothing is, and 2 if the run could not be judged.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.cli import command, option, parse
from common.errors import UsageError
from ddp.audit import launch
from ddp.audit.detectors import find
from ddp.audit.trace import Trace, read


@dataclass(frozen=True)
class AuditConfig:
    """Settings of ``ddp.audit``."""

    ranks: int = option(2, "ranks on which the script runs", minimum=1, maximum=64)
    quick: bool = option(False, "look closely only at the first 8 steps, and every 16th after them")
    timeout: float = option(600.0, "seconds after which the script counts as hanging", above=0)
    json: Path = option(None, "file for the findings")


@command
def main() -> None:
    arguments = sys.argv[1:]
    own, script = (arguments, []) if "--" not in arguments else _split(arguments)
    config = parse(AuditConfig, "ddp.audit", __doc__, own)
    _require_script(script)
    with tempfile.TemporaryDirectory(prefix="ddp-audit-") as directory:
        outcome = launch.run(script, config.ranks, Path(directory), config.timeout, config.quick)
        trace = read(Path(directory))
    findings = find(trace) if trace.ranks else []
    print(_summary(trace, outcome))
    for finding in findings:
        print(finding)
    if config.json:
        content = {"script": script, "seconds": outcome.seconds, "findings": [one.as_json() for one in findings]}
        config.json.write_text(json.dumps(content, indent=1) + "\n")
    _require_judged(trace, outcome)
    is_wrong = not all(finding.is_hint for finding in findings)
    if not is_wrong:
        print("nothing wrong was found")
    sys.exit(is_wrong)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _require_script(script: list[str]) -> None:
    """:raises UsageError: without a script that can be run"""
    if not script:
        raise UsageError("which script? python -m ddp.audit -- train.py ARGUMENTS")
    if "RANK" in os.environ:
        raise UsageError("this runs under torchrun already (RANK is set): the audit starts the script's ranks itself")
    if script[0] != "-m" and not Path(script[0]).is_file():
        raise UsageError(f"{script[0]}: there is no such script")


def _summary(trace: Trace, outcome: launch.Outcome) -> str:
    steps = [len(rank.steps) for rank in trace.ranks]
    epochs = [len(rank.all("epoch")) for rank in trace.ranks]
    return (
        f"{trace.world_size} ranks, {max(steps, default=0)} optimizer steps, {max(epochs, default=0)} iterations over loaders, "
        f"{outcome.seconds:.1f} s"
    )


def _require_judged(trace: Trace, outcome: launch.Outcome) -> None:
    """:raises UsageError: if the run could not be judged, with the reason"""
    if trace.errors:
        raise UsageError(f"the audit itself failed ({trace.errors[0]['what']}): {trace.errors[0]['text']}")
    if outcome.status is None:
        raise UsageError(
            f"the script did not end within {outcome.seconds:.0f} s: {'; '.join(map(_innermost, outcome.stacks))}"
        )
    if outcome.status:
        raise UsageError(f"the script failed with exit status {outcome.status}; its own output is above")
    if not trace.ranks:
        raise UsageError("the script never made a process group: it calls no init_process_group")
    if trace.world_size < 2:
        raise UsageError("the script ran on one rank: most of what can be wrong needs two, so give --ranks 2")
    if not any(rank.steps for rank in trace.ranks):
        passes = sum(len(rank.all("backward")) for rank in trace.ranks)
        raise UsageError(f"the script took no optimizer step of torch.optim ({passes} backward passes were seen)")


def _innermost(stack: str) -> str:
    """The line of the script in a stack that faulthandler wrote, with the rank."""
    rank, *frames = stack.splitlines() or [""]
    own = [frame.strip() for frame in frames if frame.strip().startswith("File") and "site-packages" not in frame]
    return f"rank {rank} is at {own[0] if own else 'an unknown place'}"


if __name__ == "__main__":
    main()
