"""Audits one job as several libraries have it in their documentation, and prints a table.

    python -m ddp.audit.libraries                  # those that are installed (the extra `libraries`)
    python -m ddp.audit.libraries torch_alone      # one

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.command_line.cli import command
from common.errors import UsageError

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parent.parent.parent / "examples"
VARIATIONS = ("run again", "on 1 rank", "on 3 ranks", "with twice as many micro-steps", "killed and started again")
LIBRARIES = ("accelerate", "lightning", "transformers")
ALL = "--vary=repeat,ranks,micro-steps,resume"
PEER = (ALL, "--batch-flag", "batch-size", "--accumulation-flag", "micro-steps", "--")
FLAGS = ("{run}", "--batch-size", "12", "--micro-steps", "2", "--dropout", "0")
TRAINER = (ALL, "--accumulation-flag", "grad-accumulation-steps", "--resume-flag", "resume", "--", "-m", "ddp.train")
SMALL = ("--train-samples", "288", "--test-samples", "100", "--epochs", "2", "--batch-size", "48", "--device", "cpu")
OURS = ("--grad-accumulation-steps", "2", "--clip-norm", "1", "--precision", "bf16", "--model", "mlp", "--dropout", "0")
# The arguments of the audit for each row.
JOBS = {
    "torch_alone": (*PEER, str(FOLDER / "torch_alone.py"), *FLAGS),
    **{name: (*PEER, str(FOLDER / f"with_{name}.py"), *FLAGS) for name in LIBRARIES},
    "ddp.train": (*TRAINER, *SMALL, *OURS, "--checkpoint-every", "2", "--run-dir", "{run}/run"),
    "own_loop_by_hand": ("--once", "--vary=repeat", "--", str(EXAMPLES / "own_loop_by_hand.py")),
    "own_loop_checkpoints": (
        "--once",
        "--vary=repeat,resume",
        "--",
        str(EXAMPLES / "own_loop_checkpoints.py"),
        "30",
        "{run}/c",
    ),
    "own_loop_sharded": ("--vary=repeat,ranks,resume", "--", str(EXAMPLES / "own_loop_sharded.py"), "30", "{run}/c"),
}


@command
def main() -> None:
    names = sys.argv[1:] or list(JOBS)
    if "--help" in names or "-h" in names:
        print(__doc__)
        return
    if unknown := [name for name in names if name not in JOBS]:
        raise UsageError(f"{unknown[0]}: there is no such job; there are {', '.join(JOBS)}")
    columns = (str(datetime.date.today()), "wrong on two ranks", *VARIATIONS)
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in names:
        package = name if name in LIBRARIES else "torch"
        if importlib.util.find_spec(package) is None:
            print(f"| {name} | not judged: {package} is not installed |{' |' * len(VARIATIONS)}")
        else:
            print(_row(f"{name} ({package} {importlib.metadata.version(package)})", JOBS[name]), flush=True)


def _row(title: str, arguments: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "audit.json"
        audit = [sys.executable, "-m", "ddp.audit", "--json", os.fspath(found), *arguments]
        done = subprocess.run(audit, capture_output=True, text=True, check=False)
        result: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {}
    cells = dict.fromkeys(VARIATIONS, "-")
    for one in result.get("variations", ()):
        (way,) = (way for way in VARIATIONS if one["what"].startswith(way))
        cells[way] = one["text"].partition(" (")[0].replace("the same samples and the same bits", "the same bits")
    findings = (one for one in result.get("findings", ()) if one["is_wrong"])
    texts = [one["text"] for one in findings if not one["name"].startswith("vary-")]
    if done.returncode > 1 or not result:
        texts = [f"not judged: {done.stderr.splitlines()[-1].removeprefix('error: ')}"]
    return f"| {title} | {'; '.join(texts) or 'nothing'} | {' | '.join(cells.values())} |"


if __name__ == "__main__":
    main()
