"""Scripts that are broken in one place: most of those that do another thing than before are found."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ddp.audit.detectors import find
from ddp.audit.peers.__main__ import EXAMPLES, FOLDER
from ddp.audit.trace import Trace, epochs
from tests.ddp.audit.forked import watch
from tests.ddp.audit.mutants import Mutant, mutants
from tests.support.launch import REPOSITORY

SMALL = ("--train-samples", "96", "--test-samples", "32", "--epochs", "2", "--device", "cpu", "--batch-size", "32")
SCRIPTS = {
    FOLDER / "torch_alone.py": ("{run}",),
    EXAMPLES / "own_loop_by_hand.py": (),
    EXAMPLES / "own_loop_checkpoints.py": ("20", "{run}/c"),
    EXAMPLES / "own_loop_sharded.py": ("20", "{run}/c"),
    REPOSITORY / "ddp" / "train.py": (
        *SMALL,
        "--grad-accumulation-steps",
        "2",
        "--clip-norm",
        "1",
        "--run-dir",
        "{run}/r",
    ),
}


def drawn(count: int, seed: int) -> list[tuple[Path, Mutant]]:
    """So many mutants of all scripts together."""
    every = [(path, mutant) for path in SCRIPTS for mutant in mutants(path.read_text(), 1000, seed)]
    return random.Random(seed).sample(every, count)


def outcome(folder: Path, path: Path, source: str) -> tuple[str | None, bool]:
    """What a script comes to, and whether the audit finds anything; None if the script fails."""
    folder.mkdir()
    (folder / path.name).write_text(source)
    arguments = [str(folder / path.name), *(one.replace("{run}", str(folder)) for one in SCRIPTS[path])]
    try:
        trace = watch(folder, arguments)
    except AssertionError:
        return None, True
    took_steps = any(rank.steps for rank in trace.ranks)
    return summary(trace).replace(str(folder), ""), not took_steps or bool(find(trace))


def summary(trace: Trace) -> str:
    """The final weights, the samples that were seen, and what was saved, on each rank."""
    return json.dumps(
        [
            (
                [step.last("step")["parameters"] for step in rank.steps[-1:]],
                [(epoch.trains, epoch.samples, epoch.rows) for epoch in epochs(rank)],
                [(event["path"], event["checksums"]) for event in rank.all("save")],
            )
            for rank in trace.ranks
        ]
    )


def missed(folder: Path, count: int, seed: int) -> tuple[list[str], int]:
    """The mutants that do another thing and are not found, and how many do another thing."""
    before = {path: outcome(folder / path.stem, path, path.read_text())[0] for path in SCRIPTS}
    names, changed = [], 0
    for i, (path, mutant) in enumerate(drawn(count, seed)):
        after, is_found = outcome(folder / str(i), path, mutant.source)
        changed += after is not None and after != before[path]
        if after != before[path] and not is_found:
            names.append(f"{path.name}, {mutant.name}")
    return names, changed


@pytest.mark.examples
def test_twenty_mutants(tmp_path: Path) -> None:
    names, changed = missed(tmp_path, 20, seed=0)
    assert len(names) <= changed / 2, names
