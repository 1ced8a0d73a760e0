"""One session of measurement: every command that gives a README its numbers, tables and figures, on one machine.

    ./torchrun_examples.sh measure --list                  # the parts, and how long they take on two idle cores
    ./torchrun_examples.sh measure                         # runs them one after another
    ./torchrun_examples.sh measure --only engines,memory   # these parts alone
    ./torchrun_examples.sh measure --publish               # copies figures to where the READMEs show them, and the records

Part NAME writes its files into ``results/NAME`` and its words into ``results/NAME.txt``. ``results/NAME.json`` has the command, the
machine, the versions, and whether other programs used the cores: then the numbers may be wrong, and nothing of the part is
published. Else its words and its record are copied to ``results/cpu``, where a test compares the READMEs' tables with them. A part
that fails does not end the session, but the exit status is 1.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.benchmarking.other_work import OtherWork
from common.benchmarking.turns import write_results
from common.child_processes import adopt_orphans, descendants, end_all_but
from common.command_line.cli import command, option, parse
from common.errors import UsageError

# For each part its command, where OUT is its folder; its minutes; and where its files are published.
PARTS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
RECORDS = Path("results/cpu")


@dataclass(frozen=True)
class MeasureConfig:
    """Settings of ``maintain.measure``."""

    list: bool = option(False, "list the parts, and run nothing")
    publish: bool = option(False, "copy the files of parts that were measured on idle cores, and run nothing")
    only: tuple[str, ...] = option(tuple(PARTS), "the parts (default: all)", choices=tuple(PARTS))
    output: Path = option(Path("results"), "folder of the results")


@command
def main() -> None:
    config = parse(MeasureConfig, "maintain.measure", __doc__)
    for name in config.only:
        print(f"{PARTS[name]['minutes']:>5} min  {name}: {PARTS[name]['command']}")
    print(f"{sum(PARTS[name]['minutes'] for name in config.only):>5} min together, on two idle cores")
    act = publish if config.publish else measure
    if failed := [name for name in config.only if not config.list and not act(name, config.output)]:
        raise SystemExit(f"error: {act.__name__} failed for {', '.join(failed)}")


def measure(name: str, output: Path) -> bool:
    """Run a part and write its record; returns whether it succeeded."""
    line = PARTS[name]["command"].replace("OUT", f"{output}/{name}")
    print(f"\n# {name}: {line}", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    others, there, began = OtherWork(), descendants(), time.monotonic()
    adopt_orphans()  # as multiprocessing's fork server: the time of its ranks is the part's, not that of other programs
    status = subprocess.call(["bash", "-o", "pipefail", "-c", f"{{ {line}\n}} | tee {output}/{name}.txt"])
    end_all_but(there, patiently=True)
    record = {"command": line, "status": status, "seconds": time.monotonic() - began}
    record["busy"] = others.doubt()
    write_results(output / f"{name}.json", record)
    print(f"# {name}: status {status} after {record['seconds']:.0f} s; {record['busy'] or 'the cores were idle'}")
    return status == 0


def publish(name: str, output: Path) -> bool:
    """Copy a part's files to where the READMEs show them; returns whether it succeeded on idle cores, without which it copies none."""
    path = output / f"{name}.json"
    if not path.exists():
        raise UsageError(
            f"--output {output} has no {path.name}: measure it first, or name what was measured with --only"
        )
    record = json.loads(path.read_text())
    if fine := record["status"] == 0 and not record["busy"]:
        for file, place in PARTS[name]["files"].items():
            shutil.copy(output / name / file, place)
        for kept in (f"{name}.txt", f"{name}.json"):
            shutil.copy(output / kept, RECORDS / kept)
    return fine


if __name__ == "__main__":
    main()
