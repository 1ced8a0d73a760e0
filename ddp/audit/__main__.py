"""Says whether a training script does distributed training right: any script, unchanged.

    python -m ddp.audit -- train.py --epochs 2               # on two CPU ranks
    python -m ddp.audit --ranks 3 --json audit.json -- -m package.module

The script runs as torchrun starts it, or by itself if it starts its own processes. It is watched from within: what each rank computes,
sends, steps, reads and writes. What is wrong is printed, a line for each thing: where in the script, the numbers that prove
it, what to do, and the chapter that explains it. A run of some ten steps and two epochs, with a checkpoint if there are any, is enough.

The exit status is 1 if something is wrong, 0 if nothing is, and 2 if the run could not be judged.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.cli import command, option, parse
from common.errors import UsageError
from common.foreign_script.run import Outcome
from ddp.audit import launch
from ddp.audit.detectors import find
from ddp.audit.trace import Trace, read
from ddp.audit.vary import KINDS, RUN, plan, vary

OUTPUT_LINES = 20  # of a variation that fails


@dataclass(frozen=True)
class AuditConfig:
    """Settings of ``ddp.audit``."""

    ranks: int = option(2, "ranks on which the script runs", minimum=1, maximum=64)
    quick: bool = option(False, "look closely only at the first 8 steps, and every 16th after them")
    timeout: float = option(600.0, "seconds after which the script counts as hanging", above=0)
    vary: tuple[str, ...] = option(
        (), "run it again: as it is, on other ranks, with micro-steps, killed and resumed", choices=KINDS
    )
    batch_flag: str = option(
        None,
        "the script's flag for the batch of a rank and micro-step, without dashes; leave it out if the batch is global",
    )
    accumulation_flag: str = option(None, "the script's flag for its micro-steps, without dashes; for micro-steps")
    resume_flag: str = option(None, "a switch with which the script goes on, without dashes; for resume")
    json: Path = option(None, "file for the findings")


@command
def main() -> None:
    arguments = [*sys.argv[1:], "--"]
    at = arguments.index("--")
    own, script = arguments[:at], arguments[at + 1 : -1]
    if not {"-h", "--help"} & set(own):
        _require_script(script)
    config = parse(AuditConfig, "ddp.audit", __doc__, own)
    flags = (flag and flag.lstrip("-") for flag in (config.batch_flag, config.accumulation_flag, config.resume_flag))
    plans = plan(config.vary, script, config.ranks, *flags)
    with tempfile.TemporaryDirectory() as folder:
        trace, outcome = _run(config, Path(folder), script, config.ranks)
    findings = find(trace) if trace.ranks else []
    unjudged = _why_unjudged(trace, outcome)
    print(_summary(trace, outcome))
    for finding in findings:
        print(finding)
    variations = []
    for variation in vary([] if unjudged else plans, trace, functools.partial(_run_again, config)):
        print(variation.finding or f"{variation.what}: {variation.text}", flush=True)
        variations.append(variation)
        if variation.finding:
            findings.append(variation.finding)
    if config.json:
        content = {
            "script": script,
            "seconds": outcome.seconds,
            "findings": [finding.as_json() for finding in findings],
            "variations": [variation.as_json() for variation in variations],
        }
        config.json.write_text(json.dumps(content, indent=1) + "\n")
    if unjudged:
        raise UsageError(unjudged)
    if not all(finding.is_hint for finding in findings):
        sys.exit(1)
    if not all(variation.is_judged for variation in variations):
        raise UsageError("the script did not run in every way that was asked for; see above")
    print("nothing wrong was found")


def _run(
    config: AuditConfig,
    folder: Path,
    script: Sequence[str],
    ranks: int,
    kill_at: int | None = None,
    output: Path | None = None,
) -> tuple[Trace, Outcome]:
    """Run the script with this folder of the run, and read what its ranks have written down."""
    arguments = [argument.replace(RUN, os.fspath(folder)) for argument in script]
    with tempfile.TemporaryDirectory(prefix="ddp-audit-") as name:
        events = Path(name)
        outcome = launch.run(arguments, ranks, events, config.timeout, config.quick, kill_at, output)
        return read(events), outcome


def _run_again(config: AuditConfig, folder: Path, script: Sequence[str], ranks: int, kill_at: int | None) -> Trace:
    """:raises UsageError: if the script fails, which it did not before"""
    with tempfile.NamedTemporaryFile("r") as output:
        trace, outcome = _run(config, folder, script, ranks, kill_at, Path(output.name))
        if outcome.status != 0 and not kill_at:
            own, *_ = output.read().partition("torch/distributed/elastic")  # torchrun's report follows
            sys.stderr.write("".join(own.splitlines(keepends=True)[-OUTPUT_LINES:-1]))
            raise UsageError(f"{' '.join(script)} {'hangs' if outcome.status is None else 'fails'}")
        return trace


def _require_script(script: list[str]) -> None:
    """:raises UsageError: without a script that can be run"""
    if not script:
        raise UsageError("which script? python -m ddp.audit -- train.py ARGUMENTS (with -- before it)")
    if "RANK" in os.environ:
        raise UsageError("this runs under torchrun already (RANK is set): the audit starts the script's ranks itself")
    if script[0] != "-m" and not Path(script[0]).is_file():
        raise UsageError(f"{script[0]}: there is no such script")


def _summary(trace: Trace, outcome: Outcome) -> str:
    steps = [len(rank.steps) for rank in trace.ranks]
    epochs = [len(rank.all("epoch")) for rank in trace.ranks]
    return (
        f"{trace.world_size} ranks, {max(steps, default=0)} optimizer steps, {max(epochs, default=0)} iterations over loaders, "
        f"{outcome.seconds:.1f} s"
    )


def _why_unjudged(trace: Trace, outcome: Outcome) -> str | None:
    """Why a run cannot be judged, if it cannot."""
    if trace.errors:
        return f"the audit itself failed: {trace.errors[0]}"
    if outcome.status is None:
        return f"the script did not end within {outcome.seconds:.0f} s: {'; '.join(map(_innermost, outcome.stacks))}"
    if outcome.status:
        return f"the script failed with exit status {outcome.status}; its own output is above"
    if not trace.ranks:
        return "the script never made a process group: it calls no init_process_group"
    if trace.world_size < 2:
        return "the script ran on one rank: most of what can be wrong needs two, so give --ranks 2"
    if not any(rank.steps for rank in trace.ranks):
        passes = sum(len(rank.all("backward")) for rank in trace.ranks)
        return f"the script took no optimizer step of torch.optim ({passes} backward passes were seen)"
    return None


def _innermost(stack: str) -> str:
    """The line of the script in a stack that faulthandler wrote, with the rank."""
    rank, *frames = stack.splitlines() or [""]
    own = [frame.strip() for frame in frames if frame.strip().startswith("File") and "site-packages" not in frame]
    return f"rank {rank} is at {own[0] if own else 'an unknown place'}"


if __name__ == "__main__":
    main()
