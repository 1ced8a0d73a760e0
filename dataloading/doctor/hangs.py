"""A loader that gives no batch any more: where each of its processes is, and which threads lived before its workers."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.foreign_script.failure import own_lines, short
from dataloading.doctor.measured import Loader
from dataloading.doctor.source import text_of


@dataclass
class Patience:
    """Decides when a watched run is over: some seconds after its first batch, or when no batch comes any more.

    :ivar hangs: whether no batch has come in ``timeout`` seconds
    """

    directory: Path
    seconds: float
    timeout: float
    hangs: bool = False

    def is_over(self) -> bool:
        """Called every 0.2 s while the script runs."""
        now = time.monotonic()
        for path in self.directory.glob("*.waits"):
            if len(content := path.read_bytes()) == struct.calcsize("dd"):
                since, first = struct.unpack("dd", content)
                if since and now - since > self.timeout:
                    self.hangs = True
                    return True
                if first and now - first > self.seconds and not (since and now - since > 1.0):
                    return True
        return False


def explain(loaders: list[Loader], stacks: Sequence[str], patience: Patience) -> Iterator[str]:
    """Where each process is, with the line of the script; nothing for a worker that waits for work."""
    yield f"no batch in {patience.timeout:.0f} s:"
    slots = {pid: slot for one in loaders for event in one.all("iterator") for slot, pid in enumerate(event["workers"])}
    for stack in stacks:
        pid, threads = int(stack[:10]), stack[10:].strip().split("\n\n")
        main = next((thread for thread in threads if thread.startswith("Current")), threads[-1])
        main, *_ = main.partition("in _worker_loop")  # a forked worker's stack goes on with its parent's
        name = f"worker {slots[pid]}" if pid in slots else "the main process"
        line = next(own_lines(main), "")
        if pid in slots and not line and "_utils/fetch.py" not in main:
            yield f"  {name} (process {pid}) waits for indices"
            continue
        innermost = next(iter(re.findall(r"^  File .*", main, re.MULTILINE)), "")
        text = text_of(line) if line else innermost.strip()
        yield f"  {name} (process {pid}) is at {line or 'no line of the script'}: {text}"
    for loader in loaders:
        alive = {name: line for event in loader.all("threads") for name, line in event["alive"]}
        for name, line in alive.items():
            at = f" at {short(line)}: {text_of(line)}" if line else ""
            yield f"  before the workers of {short(loader.line)} were forked, thread {name} lived{at}. A lock that it held stays locked"
