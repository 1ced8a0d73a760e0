"""Audits one job as several libraries have it in their documentation, and prints a table.

    python -m ddp.audit.peers                  # those that are installed (the extra peers)
    python -m ddp.audit.peers torch_alone      # one

The job: 3 epochs on 144 samples, 2 micro-steps, clipping, mixed precision, an evaluation and a checkpoint after each epoch. Each is run again
as it is, on 1 and 3 ranks, with 4 micro-steps, and killed and resumed. This project's own trainers and examples stand beside it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common.cli import command
from common.errors import UsageError

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parent.parent.parent / "examples"
VARIATIONS = ("run again", "on 1 rank", "on 3 ranks", "with twice as many micro-steps", "killed and started again")
SMALL = ("--train-samples", "288", "--test-samples", "100", "--epochs", "2", "--batch-size", "48")


class Job(NamedTuple):
    """A row of the table.

    :ivar package: that must be installed
    :ivar audit: flags of the audit
    """

    package: str
    script: tuple[str, ...]
    audit: tuple[str, ...]


PEER = ("--vary", "repeat,ranks,micro-steps,resume", "--batch-flag", "batch-size", "--accumulation-flag", "micro-steps")
FLAGS = ("{run}", "--batch-size", "12", "--micro-steps", "2", "--dropout", "0")
TRAINER = (
    "--vary",
    "repeat,ranks,micro-steps,resume",
    "--accumulation-flag",
    "grad-accumulation-steps",
    "--resume-flag",
    "resume",
)
OURS = ("--grad-accumulation-steps", "2", "--clip-norm", "1", "--precision", "bf16", "--model", "mlp", "--dropout", "0")
JOBS = {
    "torch_alone": Job("torch", (str(FOLDER / "torch_alone.py"), *FLAGS), PEER),
    "accelerate": Job("accelerate", (str(FOLDER / "with_accelerate.py"), *FLAGS), PEER),
    "lightning": Job("lightning", (str(FOLDER / "with_lightning.py"), *FLAGS), PEER),
    "transformers": Job("transformers", (str(FOLDER / "with_transformers.py"), *FLAGS), PEER),
    "ddp.train": Job(
        "torch",
        ("-m", "ddp.train", "--device", "cpu", *SMALL, *OURS, "--checkpoint-every", "2", "--run-dir", "{run}/run"),
        TRAINER,
    ),
    "own_loop_by_hand": Job("torch", (str(EXAMPLES / "own_loop_by_hand.py"),), ("--vary", "repeat")),
    "own_loop_checkpoints": Job(
        "torch", (str(EXAMPLES / "own_loop_checkpoints.py"), "30", "{run}/c"), ("--vary", "repeat,resume")
    ),
    "own_loop_sharded": Job(
        "torch", (str(EXAMPLES / "own_loop_sharded.py"), "30", "{run}/c"), ("--vary", "repeat,ranks,resume")
    ),
}


@command
def main() -> None:
    names = sys.argv[1:] or list(JOBS)
    if "--help" in names or "-h" in names:
        print(__doc__)
        return
    if unknown := [name for name in names if name not in JOBS]:
        raise UsageError(f"{unknown[0]}: there is no such job; there are {', '.join(JOBS)}")
    columns = ("wrong on two ranks", *VARIATIONS)
    print(f"| {datetime.date.today()} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name in names:
        job = JOBS[name]
        if importlib.util.find_spec(job.package) is None:
            print(f"| {name} | not judged: {job.package} is not installed |{' |' * len(VARIATIONS)}")
        else:
            print(_row(f"{name} ({job.package} {importlib.metadata.version(job.package)})", job), flush=True)


def _row(title: str, job: Job) -> str:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "audit.json"
        audit = [sys.executable, "-m", "ddp.audit", "--json", os.fspath(found), *job.audit, "--", *job.script]
        done = subprocess.run(audit, capture_output=True, text=True, check=False)
        result: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {"findings": [], "variations": []}
    cells = ["-"] * len(VARIATIONS)
    for one in result["variations"]:
        at = next(i for i, what in enumerate(VARIATIONS) if one["what"].startswith(what))
        cells[at] = one["text"].partition(" (")[0].replace("the same samples and the same bits", "the same bits")
    varied = tuple(VARIATIONS)
    texts = [one["text"] for one in result["findings"] if not one["is_hint"] and not one["text"].startswith(varied)]
    if done.returncode > 1:
        texts = [f"not judged: {done.stderr.splitlines()[-1].removeprefix('error: ')}"]
    return f"| {title} | {'; '.join(texts) or 'nothing'} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
