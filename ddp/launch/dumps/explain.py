"""Why a job hangs, from what its ranks left behind: flight-recorder dumps, and stacks of Python.

    python -m ddp.launch.doctor --dumps DIR

DIR has, at any depth, a file per rank, with the rank in its name. It is a dump of torch's flight recorder (a pickle or JSON, of NCCL or
gloo), or stacks (of faulthandler, ``py-spy dump``, or the logs of our own trainer). Nothing in them is executed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.command_line.cli import command, option, parse
from common.errors import UsageError
from ddp.launch.dumps.compare import findings
from ddp.launch.dumps.recorded import Recorded, read_dump
from ddp.launch.dumps.stacks import main_threads
from ddp.launch.ranks import listed, ranks_of

DUMPS = ("", ".json", ".pickle", ".pkl")  # suffixes; torch gives none


@dataclass(frozen=True)
class DumpsConfig:
    """Settings of ``ddp.launch.doctor --dumps``."""

    dumps: Path = option(None, "folder of flight-recorder dumps and stacks, one file per rank")


@dataclass
class HangArtifacts:
    """The dumps and stacks of the ranks."""

    dumps: dict[int, Recorded] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)  # where the main thread is
    unread: list[str] = field(default_factory=list)  # a line for each file that should be a dump and is none

    @property
    def silent(self) -> list[int]:
        """The ranks that are known from the others, and wrote no dump."""
        known = {rank for dump in self.dumps.values() for ranks in dump.groups.values() for rank in ranks}
        return sorted(known - self.dumps.keys())


def gathered(folder: Path) -> HangArtifacts:
    """Everything in a folder; if several attempts wrote dumps, only those of the last."""
    left = HangArtifacts()
    dumps = defaultdict(list)  # by folder
    for path, rank in ranks_of(sorted(path for path in folder.rglob("*") if path.is_file())).items():
        numbers = re.findall(r"\d+", path.name)
        if numbers and not _is_dump(path) and (stacks := main_threads(path.read_text(errors="replace"))):
            left.stacks[int(numbers[-1]) if rank is None else rank] = stacks[-1]
        elif path.suffix in DUMPS and rank is not None:
            dumps[path.parent].append((path.stat().st_mtime, rank, path))
    # Folders of several nodes have different ranks. One that has a rank of a newer folder is of an earlier attempt.
    taken: set[int] = set()
    for files in sorted(dumps.values(), key=max, reverse=True):
        ranks = {rank for _, rank, _ in files}
        if taken & ranks:
            continue
        taken |= ranks
        for _, rank, path in sorted(files):
            try:
                left.dumps[rank] = read_dump(path)
            except ValueError as error:
                left.unread.append(f"{path}: {error}")
    left.dumps = dict(sorted(left.dumps.items()))
    return left


def _is_dump(path: Path) -> bool:
    """Whether a file begins as a pickle or as JSON, so that it need not be read as text."""
    with path.open("rb") as stream:
        return stream.read(1) in (b"\x80", b"{")


def report(left: HangArtifacts) -> Iterator[str]:
    """The lines of the verdict."""
    yield "read " + " and ".join(
        f"{kind} of {listed(ranks)}" for kind, ranks in (("dumps", left.dumps), ("stacks", left.stacks)) if ranks
    )
    yield from (f"left out {line}" for line in left.unread)
    if left.silent and left.dumps:
        yield f"{listed(left.silent)} wrote no dump: dead, stopped or cut off when the others wrote theirs. Read its log first"
    found = findings(left.dumps)
    yield from (finding.text for finding in found)
    calls = [call for dump in left.dumps.values() for call in dump.collectives]
    if left.dumps and not calls:
        yield "no collectives in the dumps; send and recv are not compared"
    elif left.dumps and not found and not left.silent:
        last = next((call for call in calls if call.is_undone), calls[-1])
        yield f"all ranks called the same collectives, up to {last}: no rank is behind, so the operation itself hangs or is slow"
        yield "look at the link and the GPU: python -m ddp.launch.doctor measures links, and NCCL_DEBUG=INFO names them"
    for place in sorted(set(left.stacks.values())):
        yield f"{listed(rank for rank in left.stacks if left.stacks[rank] == place)} now at {place}"


@command
def main() -> None:
    folder = parse(DumpsConfig, "ddp.launch.doctor", __doc__).dumps
    left = gathered(folder)
    if not left.dumps and not left.stacks:
        raise UsageError(
            f"--dumps {folder}: no dump and no stacks in it" + "".join(f"; {line}" for line in left.unread[:1])
        )
    print("\n".join(report(left)))
