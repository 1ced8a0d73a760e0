"""Scripts that are broken in one place: nearly all that are wrong are found, by one run or by one that is killed and goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddp.audit.detectors import find
from ddp.audit.libraries.__main__ import EXAMPLES, FOLDER
from ddp.audit.trace import Trace
from ddp.audit.vary import RUN
from ddp.audit.watch.event_types import Save
from tests.ddp.audit.forked import watch
from tests.ddp.audit.mutants import Mutant, mutants
from tests.ddp.audit.test_vary import varied
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


# Mutants that end with other weights, samples or files, and are right programs: no run can tell them from an intention.
OF_TORCH_ALONE = [
    "rank != 0 for rank == 0",  # another rank writes the checkpoint
    "torch.manual_seed(0), dropped",
    "torch.manual_seed(0), one line later",
    "torch.manual_seed(7) for torch.manual_seed(0)",
    "with torch.autocast('cpu', torch.float16):, always",
]
OTHER_RECIPES = {
    *OF_TORCH_ALONE,
    "if (step + 1) % 10 == 0:, always",  # checkpoints at other steps
    "step for step + 1",
    "if averaging.strategy != 'torch':, always",
    "torch.manual_seed(derive_seed(config.seed, 'weights')), dropped",
    "torch.manual_seed(derive_seed(config.seed, 'weights')), one line later",
    "torch.manual_seed(7) for torch.manual_seed(derive_seed(config.seed, 'weights'))",
    "torch.set_num_threads(config.threads or env.share_of_cores), dropped",
    "True for False",  # buffers that are sent in each step
}
MOST_MISSED = 0.05  # of those that are wrong
HANGS_S = 30.0


def outcome(folder: Path, path: Path, source: str) -> tuple[str | None, bool]:
    """The result of a script, and whether the audit finds anything; None if the script fails."""
    folder.mkdir()
    (folder / path.name).write_text(source)
    try:
        trace = watch(folder, [str(folder / path.name), *SCRIPTS[path]], timeout_s=HANGS_S)
    except AssertionError:
        return None, True
    took_steps = any(rank.steps for rank in trace.ranks)
    return summary(trace).replace(str(folder), ""), not took_steps or bool(find(trace))


def differs_after_a_kill(folder: Path, path: Path, source: str) -> bool:
    """Whether ``--vary resume`` finds anything, or the script fails when it is started again."""
    if RUN not in str(SCRIPTS[path]):
        return False
    folder.mkdir()
    resume = "resume" if path.name == "train.py" else None
    try:
        found = varied(folder, source, ["resume"], arguments=SCRIPTS[path], resume=resume)
    except AssertionError:
        return True
    return any(one.finding for one in found)


def summary(trace: Trace) -> str:
    """The final weights, the samples that were seen, and what was saved, on each rank."""
    return json.dumps(
        [
            (
                [step.after.parameters for step in rank.steps[-1:]],
                [(epoch.trains, epoch.samples, epoch.rows) for epoch in rank.epochs],
                [(event.path, event.checksums) for event in rank.all(Save)],
            )
            for rank in trace.ranks
        ]
    )


def missed(folder: Path, drawn: Sequence[tuple[Path, Mutant]]) -> tuple[list[str], int]:
    """The mutants that end otherwise and are not found, and how many are found."""
    before = {path: outcome(folder / path.stem, path, path.read_text()) for path in {path for path, _ in drawn}}
    assert [path for path, (_, is_found) in before.items() if is_found] == []
    found, names = 0, []
    for i, (path, mutant) in enumerate(drawn):
        after, is_found = outcome(folder / str(i), path, mutant.source)
        if after is not None and after != before[path][0]:
            if is_found or differs_after_a_kill(folder / f"{i}-killed", path, mutant.source):
                found += 1
            else:
                names.append(mutant.name.partition(": ")[2])
    print(f"{found} are found; the others:", *names, sep="\n")
    return names, found


@pytest.mark.examples
def test_what_is_missed_is_right(tmp_path: Path) -> None:
    path, *_ = SCRIPTS
    names, _ = missed(tmp_path, [(path, mutant) for mutant in mutants(path.read_text())])
    assert sorted(names) == OF_TORCH_ALONE


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1])
def test_mutants_of_all_scripts(tmp_path: Path, seed: int) -> None:
    every = [(path, mutant) for path in SCRIPTS for mutant in mutants(path.read_text())]
    names, found = missed(tmp_path, random.Random(seed).sample(every, 100))
    wrong = [name for name in names if name not in OTHER_RECIPES]
    assert len(wrong) <= MOST_MISSED * (found + len(wrong)), wrong
