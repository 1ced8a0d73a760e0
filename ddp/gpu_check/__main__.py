"""Try on this machine's GPUs all that a machine without one cannot prove, in at most ten minutes, without a network.

    ./torchrun_examples.sh gpu-check
    python -m ddp.gpu_check --output results/my-gpu

Runs the commands of this project one after another, as a user would: the tests that need a GPU, torch's DDP against the one by
hand, each precision, a kill and its resume, a profile, the benchmarks, page-locked memory, training from files. Each has a
limit. One that fails or hangs does not end the others, and nothing that it starts outlives it. What has no time left is named.

The folder then has ``summary.txt`` and ``summary.json`` (what passed, the command to repeat what did not, what is slow and why)
and a folder for each check, with what it printed and the JSON of its results: small enough to be kept.

Without a GPU the same commands run on the CPU with small sizes, and what does not apply is left out by name.

The exit status is 0 if nothing failed, 1 if something did, and 2 for a user's error.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.child_processes import adopt_orphans
from common.cli import command, option, parse
from common.distributed import DEVICES
from common.distributed.dist_env import require_alone
from common.errors import UsageError
from common.files.run_directory import CHECKPOINT_FOLDER, prepare_output, results_in
from common.gpu.devices import count_gpus, why_no_gpu
from common.machine import describe_machine
from common.signals.stop_request import stop_signals
from ddp.gpu_check import checks, runner, summary
from ddp.gpu_check.checks import Check, Machine, sizes_of
from ddp.gpu_check.runner import FAILED, HUNG, LEFT_OUT, PASSED, Outcome
from ddp.gpu_check.summary import SUMMARY, TEXT, Entry

PRINTED = "output.txt"
KEPT, MOST_KEPT_BYTES = (".json", ".jsonl", ".txt"), 1_000_000


@dataclass(frozen=True)
class GpuCheckConfig:
    """Settings of ``ddp.gpu_check``.

    :raises UsageError: for CUDA where there is no GPU
    """

    device: str = option("auto", "auto takes all GPUs where there is any", choices=DEVICES)
    minutes: float = option(
        10.0, "for all checks together; those that have no time left do not run", minimum=1, maximum=600
    )
    output: Path = option(Path("runs/gpu-check"), "folder of the results")
    overwrite: bool = option(False, "delete the results of an earlier check that are in the folder")

    def __post_init__(self) -> None:
        if self.device == "cuda" and not count_gpus():
            raise UsageError(f"--device cuda, but {why_no_gpu()}, or use --device cpu")

    @property
    def machine(self) -> Machine:
        if self.device == "cpu" or not (gpus := count_gpus()):
            return Machine(0)
        return Machine(gpus, 1e-9 * torch.cuda.get_device_properties(0).total_memory)


@command
def main() -> None:
    config = parse(GpuCheckConfig, "ddp.gpu_check", __doc__)
    require_alone("ddp.gpu_check")
    adopt_orphans()
    with results_in(config.output):
        take_folder(config.output, config.overwrite)
        with stop_signals():
            entries = run_all(config, checks.checks(config.machine))
    sys.exit(int(any(entry.outcome.status in (FAILED, HUNG) for entry in entries)))


def take_folder(folder: Path, overwrite: bool) -> None:
    """Make the folder of the results, empty.

    :raises UsageError: when it holds results, unless they are overwritten, or anything else
    """
    prepare_output(folder)
    entries = sorted(entry.name for entry in folder.iterdir())
    ours = {SUMMARY, TEXT, *(check.name for check in checks.checks(Machine(1)))}
    if foreign := [name for name in entries if name not in ours]:
        raise UsageError(
            f"--output {folder} holds {foreign[0]}, which no check has written: give an empty or another folder"
        )
    if entries and not overwrite:
        raise UsageError(f"--output {folder} holds the results of a check: give another, or --overwrite to delete them")
    for name in entries:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_all(config: GpuCheckConfig, todo: list[Check]) -> list[Entry]:
    """Run the checks one after another, and write the summary after each."""
    deadline = time.monotonic() + 60 * config.minutes
    machine, sizes = {"used": vars(config.machine), **describe_machine()}, sizes_of(config.machine)
    entries: list[Entry] = []
    for number, check in enumerate(todo, 1):
        entry = run_check(check, sizes, config, deadline - time.monotonic())
        entries.append(entry)
        text = summary.write_summary(config.output, machine, entries, [other.name for other in todo[number:]])
        outcome = entry.outcome
        words = f" in {outcome.seconds:.0f} s" if outcome.seconds else ""
        reason = f": {outcome.reason}" if outcome.reason else ""
        print(f"[{number}/{len(todo)}] {check.name}: {outcome.status}{words}{reason}", flush=True)
    print(f"\n{text}\n\nresults in {config.output}: {SUMMARY}, {TEXT}, and a folder for each check")
    return entries


def run_check(check: Check, sizes: dict[str, str], config: GpuCheckConfig, left_s: float) -> Entry:
    """Run one check, read its numbers, and keep of its folder what is worth it."""
    folder = config.output / check.name
    command_line = check.command.format(out=shlex.quote(str(folder)), **sizes)
    if check.obstacle:
        return Entry(check.name, check.shows, command_line, Outcome(LEFT_OUT, 0.0, check.obstacle))
    folder.mkdir()
    device = config.machine.device
    outcome = runner.run_command(command_line, folder / PRINTED, check.limit_s, left_s, device, check.expects)
    found: dict[str, Any] = {}
    if outcome.status == PASSED and check.reads is not None:
        try:
            found = check.reads(folder)
        except (OSError, ValueError, LookupError, UsageError) as error:
            outcome = Outcome(FAILED, outcome.seconds, f"its results cannot be read: {error!r}")
    keep_results(folder)
    return Entry(check.name, check.shows, command_line, outcome, found)


def keep_results(folder: Path) -> None:
    """Delete all but small JSON and text: checkpoints, traces, figures."""
    for path in sorted(folder.rglob("*"), reverse=True):  # what is in a folder comes before it
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif (
            path.suffix not in KEPT
            or CHECKPOINT_FOLDER in path.relative_to(folder).parts
            or path.stat(follow_symlinks=False).st_size > MOST_KEPT_BYTES
        ):
            path.unlink()


if __name__ == "__main__":
    main()
