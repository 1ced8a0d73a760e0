"""One audit from beginning to end: it runs a script on ranks, judges what they did, and runs the script again in other ways."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.command_line.cli import option
from common.errors import UsageError
from common.foreign_script import start
from common.foreign_script.run import Outcome
from ddp.audit import launch
from ddp.audit.detectors import find
from ddp.audit.finding import Finding
from ddp.audit.judged import judged, why_ended
from ddp.audit.names import is_ignored, require_ignored
from ddp.audit.settle import settle
from ddp.audit.trace import Trace, read
from ddp.audit.vary import KINDS, RUN, Plan, Variation, plan, second, third, vary
from ddp.audit.watch.event_types import LoaderBegins

START_S = 60.0  # a generous time for imports, and for a run whose first one was short


@dataclass(frozen=True)
class AuditConfig(launch.RanksConfig):
    """Settings of ``ddp.audit``."""

    device: str = option(
        "auto",
        "the devices that the script finds: auto takes GPUs, or a stand-in for each if there are fewer than ranks; cpu hides GPUs",
        choices=start.DEVICES,
    )
    quick: bool = option(False, "look closely only at the first 8 steps, and every 16th after them")
    ignore: tuple[str, ...] = option((), "findings to leave out, each as NAME, NAME:FILE or NAME:FILE:LINE")
    nodes: int = option(1, "nodes, each with an agent of torchrun and its part of the ranks", minimum=1, maximum=8)
    once: bool = option(False, "no second run, on one rank with the batches of all, which settles suspicions")
    vary: tuple[str, ...] = option(
        (), "run it again: as it is, on other ranks, with micro-steps, killed and resumed", choices=KINDS
    )
    batch_flag: str = option(
        None,
        "the script's flag for the batch of a rank and micro-step; leave it out if the batch is global",
    )
    accumulation_flag: str = option(None, "the script's flag for its micro-steps; for micro-steps")
    resume_flag: str = option(None, "a switch with which the script goes on; for resume")
    json: Path = option(None, "file for the findings")
    format: str = option("text", "how findings are printed; github: as annotations", choices=("text", "github"))
    explain: str = option(None, "print what the finding of this name is, and what to do; nothing is run")


@dataclass
class Report:
    """The result of an audit.

    :ivar unjudged: why the run cannot be judged, if it cannot
    :ivar partly: what was not watched, and why detectors judged nothing of what they look at, a line each
    :ivar ignored: what the user leaves out
    :ivar cleared: suspicions that a second run has cleared
    :ivar looked_at: what was judged
    """

    outcome: Outcome
    unjudged: str | None
    partly: list[str]
    findings: list[Finding] = field(default_factory=list)
    ignored: list[Finding] = field(default_factory=list)
    variations: list[Variation] = field(default_factory=list)
    cleared: list[Finding] = field(default_factory=list)
    looked_at: str = ""

    def wrong(self) -> list[Finding]:
        """The findings that are proven.

        :raises UsageError: if the script could not be judged
        """
        if self.unjudged or not self.looked_at:
            raise UsageError(self.unjudged or "no detector saw anything that it could judge")
        wrong = [finding for finding in self.findings if finding.is_wrong]
        if not wrong and not all(one.is_judged or not one.plan.is_asked for one in self.variations):
            raise UsageError("the script did not run in every way that was asked for; see above")
        return wrong

    def as_json(self) -> dict[str, object]:
        return {
            "seconds": self.outcome.seconds,
            "findings": [finding.as_json() for finding in self.findings],
            "ignored": [finding.as_json() for finding in self.ignored],
            "cleared": [finding.as_json() for finding in self.cleared],
            "not_judged": self.partly,
            "looked_at": self.looked_at,
            "variations": [variation.as_json() for variation in self.variations],
        }


def check(*script: str | Path, **settings: Any) -> None:
    """Audit a script in a test: ``check("train.py", "--epochs", "2", ranks=3)``.

    :param script: its path, or ``-m`` and a module, and its arguments
    :param settings: flags of the command, such as ``vary=("resume",)``
    :raises AssertionError: with a line for each finding that is proven
    :raises UsageError: if the script cannot be judged, and why
    """
    if wrong := audit(AuditConfig(**settings), list(map(str, script)), lambda _: None).wrong():
        raise AssertionError("\n".join(map(str, wrong)))


def audit(config: AuditConfig, script: Sequence[str], say: Callable[[object], object]) -> Report:
    """Run a script, and what is asked for besides.

    :param say: gets each line to print, as soon as it is known
    :raises UsageError: without a script that can be run, or if the settings do not suit it
    """
    start.require_script(script, "ddp.audit")
    require_ignored(config.ignore, Path(script[0]))
    if config.ranks % config.nodes:
        raise UsageError(f"--ranks {config.ranks} cannot be divided among --nodes {config.nodes}")
    if config.nodes > 1 and config.start == "python":
        raise UsageError(f"--nodes {config.nodes} has agents of torchrun, which --start python leaves out")
    plans = plan(config.vary, script, config.ranks, config.batch_flag, config.accumulation_flag, config.resume_flag)
    with tempfile.TemporaryDirectory() as folder:
        trace, outcome = _run(config, Path(folder), script, config.ranks)
    found = find(trace) if trace.world_size > 1 else []
    missing = [f"not watched, since this torch does not have it: {name}" for name in trace.not_watched]
    why, not_judged, seen = judged(trace, outcome)
    report = Report(outcome, why, missing + not_judged, looked_at=seen)
    for line in (_summary(trace, outcome, start.device_for(config.device, config.ranks)), *report.partly):
        say(line)
    suspicions = [finding for finding in found if finding.is_suspicion]
    for finding in found:
        if _add(report, finding, config) and not finding.is_suspicion:
            say(_line(finding, config))
    if not report.unjudged:
        _vary(config, script, plans, trace, report, suspicions, say)
    for finding in suspicions:
        if finding in report.findings:
            if finding.is_suspicion and not finding.unsettled:
                finding.unsettled = "there was no second run"
            say(_line(finding, config))
    return report


def _vary(
    config: AuditConfig,
    script: Sequence[str],
    plans: list[Plan],
    base: Trace,
    report: Report,
    suspicions: Sequence[Finding],
    say: Callable[[object], object],
) -> None:
    """Run the script again as is asked for, in the way that settles most, and in one more where a loss of 1 / ranks stands in question.

    :param suspicions: also those that the user ignores, since the runs show their effects
    """
    # A script that waits for ranks that are not there need not do so for the whole time.
    limit = min(config.timeout, START_S + 2 * config.ranks * report.outcome.seconds)
    again = functools.partial(_run_again, replace(config, timeout=limit))
    known = any(finding.is_wrong for finding in (*report.findings, *report.ignored))

    def rerun(plan: Plan) -> None:
        say(f"the script runs once more: {plan.what}")
        variation = vary(plan, base, again)
        report.variations.append(variation)
        settled = [(one, settle(one, report.variations, base)) for one in suspicions]
        report.cleared = [one for one, is_right in settled if is_right is False and one not in report.ignored]
        report.findings = [one for one in report.findings if one not in report.cleared]
        proven = [one for one, is_right in settled if is_right]  # perhaps by a later run than one that cleared it
        report.findings += [one for one in proven if one not in (*report.findings, *report.ignored)]
        # The cause has a finding of its own, or may have.
        may_be_effect = plan.kind == "ranks" and not plan.is_asked
        is_effect = may_be_effect and (known or any(is_right for _, is_right in settled))
        if variation.finding and not is_effect and _add(report, variation.finding, config):
            say(_line(variation.finding, config))
        else:
            say(f"{variation.what}: {variation.text}")

    if not (config.once or "ranks" in config.vary):
        try:
            plans = [second(script, config.ranks, config.batch_flag, base), *plans]
        except UsageError as error:
            say(f"there is no second run: {error}")
            for finding in suspicions:
                finding.unsettled = f"there is no second run, since {error}"
    for one in plans:
        rerun(one)
    for finding in suspicions:
        is_open = finding.is_suspicion and finding in report.findings
        if finding.name == "loss-divided-by-ranks" and is_open and not config.once:
            rerun(third(script, config.ranks, finding))
    for finding in report.cleared:
        say(f"{':'.join(finding.place)}: {finding.name} was suspected, and the runs above clear it")


def _add(report: Report, finding: Finding, config: AuditConfig) -> bool:
    """Whether a finding is not ignored."""
    is_left_out = is_ignored(finding, config.ignore)
    (report.ignored if is_left_out else report.findings).append(finding)
    return not is_left_out


def _line(finding: Finding, config: AuditConfig) -> str:
    return finding.as_annotation() if config.format == "github" else str(finding)


def _run(
    config: AuditConfig,
    folder: Path,
    script: Sequence[str],
    ranks: int,
    kill_at: int | None = None,
    batches: str = "",
    output: Path | None = None,
) -> tuple[Trace, Outcome]:
    """Run the script with this folder of the run, and read what its ranks have written down."""
    arguments = [argument.replace(RUN, os.fspath(folder)) for argument in script]
    device = start.device_for(config.device, max(ranks, config.ranks))  # the same in all runs, if it can be
    with tempfile.TemporaryDirectory(prefix="ddp-audit-") as name:
        events = Path(name)
        environment = launch.environment(device, ranks, arguments, launch.WATCH) | {
            "DDP_AUDIT_DIRECTORY": name,
            "DDP_AUDIT_QUICK": "1" if config.quick else "",
            "DDP_AUDIT_KILL_AT": str(kill_at or 0),
            "DDP_AUDIT_BATCHES": batches,
        }
        if batches and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(config.ranks)  # the cores of all ranks
        nodes = config.nodes if ranks % config.nodes == 0 else 1
        outcome = start.run_ranks(arguments, ranks, config.start, environment, config.timeout, events, output, nodes)
        return read(events, ranks), outcome


def _run_again(
    config: AuditConfig, folder: Path, script: Sequence[str], ranks: int, kill_at: int | None, batches: str
) -> Trace:
    """:raises UsageError: if the script fails, which it did not before"""
    trace, outcome = _run(config, folder, script, ranks, kill_at, batches, Path(os.devnull))
    why = why_ended(trace, outcome)
    if why and not kill_at:
        raise UsageError(why)
    return trace


def _summary(trace: Trace, outcome: Outcome, device: str) -> str:
    steps = [len(rank.steps) for rank in trace.ranks]
    epochs = [len(rank.all(LoaderBegins)) for rank in trace.ranks]
    stand_in = " on stand-in GPUs" if device == "stand-in" else ""
    return (
        f"{trace.world_size} ranks{stand_in}, {max(steps, default=0)} optimizer steps, "
        f"{max(epochs, default=0)} iterations over loaders, {outcome.seconds:.1f} s"
    )
