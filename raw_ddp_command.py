"""The command ``raw-ddp``: each tool by its name, also where a folder of the user's has a ``ddp`` or ``common`` of its own.

    raw-ddp audit train.py --epochs 2      # as python -m ddp.audit -- train.py --epochs 2

``python -m ddp.audit`` takes the first ``ddp`` that it finds, which may be the user's. Here our packages come before those of
PYTHONPATH and of the working directory. It changes only ``sys.path`` of this process: a script that is audited finds its own packages.
"""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig

TOOLS = {
    "audit": "ddp.audit",
    "gpu": "ddp.audit.gpu",
    "museum": "ddp.museum",
    "conformance": "ddp.conformance",
    "doctor": "ddp.launch.doctor",
    "train": "ddp.train",
    "bench": "ddp.bench",
    "ladder": "ddp.ladder",
    "dataloading.bench": "dataloading.bench",
    "dataloading.doctor": "dataloading.doctor",
    "dataloading.ladder": "dataloading.ladder",
    "dataparallel.train": "dataparallel.train",
    "dataparallel.bench": "dataparallel.bench",
}
FOLDER = os.path.dirname(os.path.abspath(__file__))
STANDARD = sysconfig.get_path("stdlib")


def _order(entry: str) -> int:
    """Behind the standard library, since other packages lie in our folder, too, and some have the name of a module of it."""
    if entry.startswith(STANDARD) and "-packages" not in entry:
        return 0
    return 1 if entry == FOLDER else 2


# When this is imported: by the command, and by its fork server (ddp/rendezvous/worker_group.py).
sys.path.append(FOLDER)
sys.path.sort(key=_order)


def main() -> None:
    name, *arguments = sys.argv[1:] or [""]
    if name not in TOOLS:
        said = "which tool?" if name in ("", "-h", "--help") else f"error: {name}: there is no such tool;"
        print(f"{said} raw-ddp TOOL ARGUMENTS, with one of {', '.join(TOOLS)}", file=sys.stderr)
        sys.exit(0 if name in ("-h", "--help") else 2)
    sys.path.insert(sys.path.index(FOLDER) + 1, os.getcwd())  # for what the user names as module:function
    module = TOOLS[name]
    sys.argv = ["-m", *arguments]  # by which our packages know that a command is started
    sys.orig_argv = [sys.executable, "-m", module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
