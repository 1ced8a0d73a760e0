"""A picture of one training step: the computation of each rank and the collectives between them, over time.

    python -m ddp.timeline
    python -m ddp.timeline --model resnet18 --all-reduce shared-memory
    python -m ddp.timeline --bucket-mib 1000       # one bucket: no overlap
    python -m ddp.timeline --strategy zero3        # shards: gathers, computation, reduce-scatters, and memory below them

Trains with the hand-written DDP, or shards by hand, and draws the step of median duration. For replicas: forward, backward with the
moment at which each gradient is ready, each bucket's all-reduce below, the wait for the rest of them, and the optimizer. A trace of
all steps is written too; open it at https://ui.perfetto.dev.

With a GPU for each rank it records replicas on GPUs, over NCCL: the moments are those of the GPU's streams, by CUDA events. What the host
does meanwhile, ``ddp.train --profile`` shows.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any, NamedTuple

from common.cli import command
from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import Progress
from common.distributed.worker_group import WorkerGroup
from common.files.run_directory import files_line
from common.reporting.spans import Span, shifted, write_trace
from common.reporting.turns import CPU, run_benchmark, write_results
from ddp.timeline.config import StepTimelineConfig
from ddp.timeline.parts import divide

WARMUP = 3  # unrecorded steps; buckets are final, and the order of units is known, after the first
BLOCK = 5  # consecutive steps between two reports of progress
FILES = ("timeline.png", "trace.json", "steps.json")


class RecordedSteps(NamedTuple):
    """The recorded steps of one training.

    :param facts: of the model, and for replicas ``backward_alone``: seconds of backward passes without synchronization, each
        on all ranks
    :param steps: for each step its spans on each rank
    """

    facts: dict[str, Any]
    steps: list[list[list[Span]]]


@command
def main() -> None:
    run_benchmark(StepTimelineConfig, "ddp.timeline", __doc__, None, measure, report)


def _subject(config: StepTimelineConfig) -> ModuleType:
    """The recorded subject. It imports torch._dynamo, which ``--help`` does without."""
    from ddp.timeline import replicas, shards

    return shards if config.stage else replicas


def measure(config: StepTimelineConfig) -> RecordedSteps:
    """Record training steps, with replicas in turns with backward passes without communication."""
    steps: list[list[list[Span]]] = []
    alone: list[list[float]] = []
    with (
        WorkerGroup(
            config.ranks,
            _subject(config).StepsOfRank,
            config,
            device=config.device,
            backend=config.placement.backend,
            threads=1,
        ) as ranks,
        Progress(DistEnv.alone(CPU), "timeline", config.steps) as progress,
    ):
        ranks.call("run", WARMUP)
        while len(steps) < config.steps:
            block = min(BLOCK, config.steps - len(steps))
            steps += map(list, zip(*ranks.call("run", block), strict=True))
            if not config.stage:
                alone += map(list, zip(*ranks.call("compute", block), strict=True))
            progress.advance(block, f"{1e3 * _seconds(steps[-1]):.0f} ms each")
        facts = ranks.call("facts")[0]
    return RecordedSteps(facts | {"backward_alone": alone}, steps)


def report(config: StepTimelineConfig, run: RecordedSteps) -> str:
    """Write the picture, the trace and the spans, and return the summary to print."""
    from ddp.timeline.figure import plot_step

    subject = _subject(config)
    origin = min(rank[0].start for rank in run.steps[0])
    steps = [[shifted(rank, origin) for rank in step] for step in run.steps]
    parts = [divide(step) for step in steps]
    durations = list(map(_seconds, steps))
    shown = durations.index(statistics.median_low(durations))
    title = subject.title(config, run.facts)
    headings = list(map(subject.heading, parts[shown]))
    plot_step(config.output / "timeline.png", steps[shown], headings, subject.look(run.facts), title)
    spans = {f"rank {rank}": [span for step in steps for span in step[rank]] for rank in range(config.ranks)}
    write_trace(config.output / "trace.json", spans)
    written = [
        [{"spans": [span._asdict() for span in rank], "parts": its} for rank, its in zip(*step, strict=True)]
        for step in zip(steps, parts, strict=True)
    ]
    facts = {"config": asdict(config), **run.facts, "shown": shown, "steps": written}
    write_results(config.output / "steps.json", facts)
    drawn = f"drawn is step {shown + 1} of {len(steps)}, the one of median duration"
    sentences = subject.sentences(config, run.facts, parts)
    return "\n".join([title, *sentences, drawn, files_line(config.output, FILES, traces=True)])


def _seconds(step: Sequence[Sequence[Span]]) -> float:
    return statistics.fmean(rank[0].seconds for rank in step)


if __name__ == "__main__":
    main()
