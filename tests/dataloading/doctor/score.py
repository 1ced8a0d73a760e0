"""Score the doctor on the slow scripts: does it name each planted cause at its line? A command, since it wants idle cores.

python -m tests.dataloading.doctor.score
"""

from __future__ import annotations

import importlib.util
import shlex
import tempfile
from pathlib import Path

from tests.dataloading.doctor.cases import CASES, Case, copy_scripts, make_data
from tests.support.launch import run_command

FLAGS = ("--device=cpu", "--seconds=15", "--trials=0")


def named(folder: Path, case: Case) -> str:
    """The line with the planted cause, or what is said instead."""
    done = run_command("dataloading.doctor", *FLAGS, "--", *shlex.split(case.command), cwd=folder, timeout_s=300)
    lines = done.stdout.splitlines()
    right = tuple(f"{place}: {case.cause}: " for place in case.planted_lines())
    found = [line for line in lines if line.startswith(right)]
    if case.cause:
        return f"right  {found[0]}" if found else f"wrong  {[line for line in lines if line[:1].isalpha()][1:]}"
    return "right  nothing is said" if lines[-1:] == ["nothing wrong was found"] else f"wrong  {lines}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_scripts(folder)
        make_data(folder)
        for case in CASES:
            if importlib.util.find_spec(case.needs):
                print(f"{case.name:22}{named(folder, case)}"[:200], flush=True)


if __name__ == "__main__":
    main()
