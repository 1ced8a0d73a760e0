"""A stdout that cannot be written, or whose reader has gone: results first, talking last."""

from __future__ import annotations

from tests.adversary.attempt import Attempt
from tests.adversary.scenes import EVALUATE, RUN

RESULTS = ("run/*", "out/*", "weights.pt")
# Commands that write their results to the disk, and print a summary.
WITH_RESULTS = [
    RUN,
    f"dataparallel.{RUN.removeprefix('ddp.').replace('--device cpu', '--devices cpu,cpu')}",
    "ddp.checkpoint export --run-dir {run} --output {here}/weights.pt",
    "dataloading.lfw_dataset --path-to-folder {faces} --batch-size 6 --visualize-batch --output {here}/out",
]
# Commands that only print.
WITHOUT = [
    EVALUATE,
    "ddp.checkpoint inspect --run-dir {run}",
    "ddp.train --help",
    "ddp.bench --help",
    "dataloading.bench --help",
]

ATTEMPTS = [
    *(
        Attempt(command, "", status=0, stdout=stdout, writes=RESULTS)
        for command in (*WITH_RESULTS, *WITHOUT)
        for stdout in ("closed", "gone")
    ),
    *(Attempt(command, "stdout cannot be written", stdout="full") for command in WITHOUT),
    *(
        Attempt(command, "the summary is lost, the results are complete", status=0, stdout="full", writes=RESULTS)
        for command in WITH_RESULTS[:1]
    ),
    # Errors go to stderr, whatever stdout is.
    *(
        Attempt(f"{RUN} --lr nan", "--lr nan is out of range", stdout=stdout)
        for stdout in ("closed", "gone", "full")
    ),
]  # fmt: skip
