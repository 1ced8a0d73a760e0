"""Train the same small jobs in two commits, and compare the final weights to the last bit.

    python -m maintain.same_bits BEFORE [AFTER] [--only NAME,...]

It proves that a refactoring changes no result of ``ddp.train`` on this machine's CPU. The metrics must be the same too,
except for timings. Each commit is checked out into a temporary folder, which is removed at the end. AFTER is HEAD by
default; ``.`` is the working tree as it is at the start. Exit status: 0 if all jobs end alike, 1 if not, 2 for bad input.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
NOT_COPIED = {".git", ".venv", ".mypy_cache", "runs", "data"}  # of the working tree
SMALL = ("--train-samples", "2880", "--test-samples", "500")  # 20 steps per epoch
STOP_STEP = 30  # inside an epoch
TIMINGS = ("seconds", "images_per_s", "data_wait")
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PET_")  # prefixes
# An editable install of another checkout supplies modules that a commit lacks. Python imports this file at its start.
SITECUSTOMIZE = 'import sys; sys.meta_path[:] = [one for one in sys.meta_path if "editable___raw_ddp" not in repr(one)]'


class Job(NamedTuple):
    """A way to train. A resumed job gets SIGTERM inside an epoch, goes on, and must end like ``fp32``."""

    flags: str = ""
    ranks: int = 2
    resumed: bool = False


JOBS = {
    "fp32": Job(),
    "bf16": Job("--precision bf16"),
    "fp16-clip": Job("--precision fp16 --clip-norm 5"),
    "micro-steps": Job("--grad-accumulation-steps 4"),
    "sync-batchnorm": Job("--sync-batchnorm"),
    "handwritten": Job("--strategy handwritten --all-reduce backend"),
    "shared-memory": Job("--strategy handwritten --all-reduce shared-memory"),
    "three-ranks": Job(ranks=3),
    "resumed": Job(f"--checkpoint-every {STOP_STEP}", resumed=True),
    "one-rank": Job(ranks=1),
    "bf16-gradients": Job("--gradient-precision bf16"),
    "zero1": Job("--strategy zero1 --clip-norm 5"),
    "zero2": Job("--strategy zero2 --grad-accumulation-steps 2"),
    "zero3": Job("--strategy zero3 --precision bf16"),
    "gpt": Job("--model gpt --width 64 --layers 2 --grad-accumulation-steps 2"),
    "files": Job("--dataset lfw --image-size 32 --model mlp --train-samples 960 --test-samples 100"),  # the drawn faces
}


def main() -> None:
    config = arguments("same_bits", __doc__, ",".join(JOBS)).parse_args()
    with checkouts(config.before, config.after) as (before, after):
        equal = [compare(name, before, after) for name in config.only]
    print(f"{sum(weights for weights, _ in equal)} of {len(config.only)} jobs end with the same bits")
    sys.exit(0 if all(map(all, equal)) else 1)


def arguments(name: str, description: str | None, jobs: str) -> ArgumentParser:
    """The command line of a comparison of two commits, by some of :data:`JOBS`."""
    parser = ArgumentParser(
        f"python -m maintain.{name}", None, description, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("before", metavar="BEFORE", type=commit, help="a commit, or . for the working tree")
    parser.add_argument(
        "after", metavar="AFTER", type=commit, nargs="?", default="HEAD", help="the same (default: HEAD)"
    )
    help_on_jobs = "jobs to run (default: %(default)s)"
    parser.add_argument("--only", metavar="NAME,...", type=job_names, default=jobs, help=help_on_jobs)
    return parser


def commit(text: str) -> str:
    """:raises ArgumentTypeError: for what is neither a commit nor the working tree"""
    if text != "." and git("rev-parse", "--verify", "--quiet", f"{text}^{{commit}}", check=False):
        raise ArgumentTypeError(f"unknown commit {text!r}")
    return text


def job_names(text: str) -> list[str]:
    """:raises ArgumentTypeError: for another name than those of :data:`JOBS`"""
    names = text.split(",")
    if unknown := [name for name in names if name not in JOBS]:
        raise ArgumentTypeError(f"unknown job {unknown[0]!r}: choose from {', '.join(JOBS)}")
    return names


@contextlib.contextmanager
def checkouts(before: str, after: str) -> Iterator[tuple[Path, Path]]:
    """Two folders for the length of the block, each with the files of a commit in ``files``; always removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # SIGTERM removes the folder too.
    with contextlib.ExitStack() as stack:
        stack.callback(git, "worktree", "prune")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="two-commits-")))
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        yield check_out(before, folder / "before"), check_out(after, folder / "after")


def git(*arguments: str, check: bool = True) -> int:
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, check=check, stdout=subprocess.DEVNULL).returncode


def check_out(commit: str, checkout: Path) -> Path:
    """Put a commit into the folder ``files`` of a new folder, in which its runs write; returns the latter."""
    files = checkout / "files"
    if commit == ".":
        shutil.copytree(REPOSITORY, files, ignore=lambda at, _: NOT_COPIED if Path(at) == REPOSITORY else ())
    else:
        git("worktree", "add", "--quiet", "--detach", str(files), commit)
    return checkout


def compare(name: str, before: Path, after: Path) -> tuple[bool, bool]:
    """Run a job in both checkouts and print the result; returns whether the weights and the metrics are equal."""
    try:
        ends = outcome(before, name), outcome(after, name)
        pairs = [(name, *ends)]
        if JOBS[name].resumed:
            for checkout, end in zip((before, after), ends, strict=True):
                pairs.append((f"fp32 and {name}, {checkout.name}", outcome(checkout, "fp32"), end))
    except subprocess.SubprocessError as error:
        print(f"{name}: failed {error}", flush=True)
        return False, False
    weights = [f"{what}: {unlike}" for what, one, other in pairs if (unlike := difference(one[0], other[0]))]
    metrics = [f"{what}: metrics differ" for what, one, other in pairs if one[1] != other[1]]
    print("\n".join([*(weights or [f"{name}: equal, {len(ends[0][0])} tensors"]), *metrics]), flush=True)
    return not weights, not metrics


@functools.cache
def outcome(checkout: Path, name: str) -> tuple[dict[str, Tensor], list[str]]:
    """Train a job to its end; returns its final weights, and its metrics without timings, as lines of JSON.

    :raises SubprocessError: when a command fails, or a job that is to be resumed cannot be stopped inside an epoch
    """
    job, run_dir, weights = JOBS[name], checkout / "runs" / name, checkout / f"{name}.pt"
    launcher = ["torch.distributed.run", f"--nproc_per_node={job.ranks}", "-m"] if job.ranks > 1 else []
    train = [*launcher, "ddp.train", "--device", "cpu", "--run-dir", str(run_dir), "--epochs", "2", *SMALL]
    train += job.flags.split()
    if job.resumed:
        saved = run_dir / "checkpoints"
        run(checkout, [*train, "--overwrite"], stop_when=lambda: any(saved.glob(f"*-step-{STOP_STEP:08d}")))
        stopped = max(path.name for path in saved.glob("epoch-*"))
        run(checkout, [*train, "--resume"])
        if stopped[-8:] == max(path.name for path in saved.glob("epoch-*"))[-8:]:
            raise subprocess.SubprocessError(f"{checkout.name}: it was stopped after its last step, which is too late")
    else:
        run(checkout, [*train, "--overwrite"])
    run(checkout, ["ddp.checkpoint", "export", "--run-dir", str(run_dir), "--output", str(weights), "--overwrite"])
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = [{field: value for field, value in record.items() if field not in TIMINGS} for record in records]
    return torch.load(weights, weights_only=True), [json.dumps(record, sort_keys=True) for record in kept]


def run(checkout: Path, arguments: Sequence[str], stop_when: Callable[[], bool] | None = None) -> None:
    """Run ``python -m ARGUMENTS`` in a checkout, to its end, or until ``stop_when()`` is true: then it gets SIGTERM.

    :raises SubprocessError: with its last lines, when its exit status is not 0, or it ended before it was stopped
    """
    command, files, log = [sys.executable, "-m", *arguments], checkout / "files", checkout / "log"
    with open(log, "wb") as file:  # A session of its own keeps a terminal's Ctrl-C from the command.
        env = environment(checkout)
        process = subprocess.Popen(command, cwd=files, env=env, stdout=file, stderr=file, start_new_session=True)
    stopped = False
    try:
        while process.poll() is None:
            if stop_when is not None and not stopped and stop_when():
                process.terminate()
                stopped = True
            time.sleep(0.02)
    finally:
        process.terminate()  # This does nothing if it has ended. torchrun also ends its ranks.
        process.wait()
    if stopped != (stop_when is not None) or stopped == (process.returncode == 0):
        end = f"{checkout.name}: {' '.join(command)} ended with status {process.returncode}:"
        raise subprocess.SubprocessError("\n    ".join([end, *log.read_text(errors="replace").splitlines()[-40:]]))


def environment(checkout: Path) -> dict[str, str]:
    """The variables of a command that runs in a checkout: its files are found first, no GPU, and no launcher around it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN_VARIABLES)}
    path = f"{checkout / 'files'}{os.pathsep}{checkout.parent}"
    return env | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def difference(before: dict[str, Tensor], after: dict[str, Tensor]) -> str | None:
    """The first tensor that differs; None if all have the same names, dtypes, shapes and bits."""
    kinds = [{name: (value.dtype, value.shape) for name, value in weights.items()} for weights in (before, after)]
    if kinds[0] != kinds[1]:
        names = sorted({name for name, _ in kinds[0].items() ^ kinds[1].items()})
        return f"differs in the names, dtypes or shapes of {', '.join(names)}"
    for name, one in before.items():  # As bytes, a NaN equals itself, and 0 is not -0.
        if not torch.equal(one.flatten().view(torch.uint8), after[name].flatten().view(torch.uint8)):
            return f"differs, first in {name}, by at most {(one.double() - after[name].double()).abs().max():.3g}"
    return None


if __name__ == "__main__":
    main()
