"""Scripts that are broken in one place: those that are wrong are found, and those that are right with another recipe are not."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
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


# Mutants of torch_alone.py that end with other weights, samples or files, and are right programs: one run cannot tell them from an
# intention. A second run with the settings that were meant would.
OTHER_RECIPES = {
    "another seed": [
        "torch.manual_seed(0), dropped",
        "torch.manual_seed(0), one line later",
        "torch.manual_seed(7) for torch.manual_seed(0)",
    ],
    "no checkpoint, or another rank's": ["if rank == 0:, dropped", "rank != 0 for rank == 0"],
    "no autocast": ["with torch.autocast('cpu', torch.float16):, always"],
}
HANGS_S = 30.0


def outcome(folder: Path, path: Path, source: str) -> tuple[str | None, bool]:
    """What a script comes to, and whether the audit finds anything; None if the script fails."""
    folder.mkdir()
    (folder / path.name).write_text(source)
    arguments = [str(folder / path.name), *(one.replace("{run}", str(folder)) for one in SCRIPTS[path])]
    try:
        trace = watch(folder, arguments, timeout_s=HANGS_S)
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


def missed(folder: Path, drawn: Sequence[tuple[Path, Mutant]]) -> tuple[list[str], int]:
    """The mutants that do another thing and are not found, and how many do another thing."""
    before = {path: outcome(folder / path.stem, path, path.read_text()) for path in {path for path, _ in drawn}}
    assert [path for path, (_, is_found) in before.items() if is_found] == []
    names, changed = [], 0
    for i, (path, mutant) in enumerate(drawn):
        after, is_found = outcome(folder / str(i), path, mutant.source)
        if after is not None and after != before[path][0]:
            changed += 1
            names += [] if is_found else [mutant.name.partition(": ")[2]]
    return names, changed


@pytest.mark.examples
def test_what_is_missed_is_right(tmp_path: Path) -> None:
    path, *_ = SCRIPTS
    names, _ = missed(tmp_path, [(path, mutant) for mutant in mutants(path.read_text())])
    assert sorted(names) == sorted(name for of_kind in OTHER_RECIPES.values() for name in of_kind)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("seed", "count"),
    [
        pytest.param(2, 12, marks=pytest.mark.examples),
        *(pytest.param(seed, 100, marks=pytest.mark.slow) for seed in (0, 1)),
    ],
)
def test_mutants_of_all_scripts(tmp_path: Path, seed: int, count: int) -> None:
    """Of all scripts together. Of those that do another thing, most of what is missed is right with another recipe."""
    every = [(path, mutant) for path in SCRIPTS for mutant in mutants(path.read_text())]
    names, changed = missed(tmp_path, random.Random(seed).sample(every, count))
    print(f"{changed - len(names)} of {changed} are found; the others:", *names, sep="\n")
    assert len(names) <= changed / 2, names
