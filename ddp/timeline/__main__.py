"""A picture of one training step: the computation of each rank and the all-reduces between them, over time.

    python -m ddp.timeline
    python -m ddp.timeline --model resnet18 --all-reduce shared-memory
    python -m ddp.timeline --bucket-mib 1000       # one bucket: no overlap
    python -m ddp.timeline --strategy zero3        # shards: gathers, computation, reduce-scatters, and memory below them

Trains with the hand-written DDP and draws the step of median duration: forward, backward with the moment at which
each gradient is ready, each bucket's all-reduce below, the wait for the rest of them, and the optimizer. A trace of all steps
is written too; open it at https://ui.perfetto.dev. For the sharded strategies see ddp/timeline/sharded/.

With a GPU for each rank it records on GPUs, over NCCL: the moments are those of the GPU's streams, by CUDA events. What the host
does meanwhile, ``ddp.train --profile`` shows.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.cli import command, parse
from common.distributed.worker_group import WorkerGroup
from common.reporting.benchmark import run_alone
from common.reporting.timing import Spread
from common.reporting.trace_events import Event, Lane, at, complete, lane_names, write_trace
from common.training.recipes import load_dataset
from ddp.config import TrainConfig
from ddp.timeline.config import StepTimelineConfig
from ddp.timeline.overlap import OverlapParts, divide
from ddp.timeline.steps import counted, median_step, record, summary, table, write_steps

if TYPE_CHECKING:
    from ddp.timeline.recording import Step

# ddp.by_hand imports torch._dynamo, and so do the modules that draw and record: functions import them, --help does not.

MOST_SIZES = 6  # bucket sizes that the title lists


@command
def main() -> None:
    config = parse(StepTimelineConfig, "ddp.timeline", __doc__)
    if config.stage:
        from ddp.timeline import sharded

        run_alone(
            "ddp.timeline", config.output, lambda: sharded.measure(config), lambda run: sharded.report(config, run)
        )
    else:
        run_alone("ddp.timeline", config.output, lambda: measure(config), lambda run: report(config, run))


@dataclass(frozen=True)
class RecordedSteps:
    """The recorded steps of one training.

    :param pids: the process id of each rank
    :param parameters: names in the order of :attr:`ddp.timeline.recording.Step.ready`
    :param buckets: in the order of their all-reduces; each maps its parameters to the bytes of the gradients
    :param steps: for each step its moments on each rank
    :param alone: for each rank, seconds of backward passes without synchronization
    """

    pids: list[int]
    parameters: list[str]
    buckets: list[dict[str, int]]
    steps: list[list[Step]]
    alone: list[list[float]]


def measure(config: StepTimelineConfig) -> RecordedSteps:
    """Record training steps, in turns with backward passes without communication."""
    from ddp.timeline.recording import Recorder

    # The learning-rate schedule needs an end; nothing here gets so far.
    learning = TrainConfig(model=config.model, batch_size=config.batch_size, epochs=10**6)
    alone: list[list[float]] = [[] for _ in range(config.ranks)]
    with WorkerGroup(
        config.ranks, Recorder, learning, load_dataset(learning), config.all_reduce, config.bucket_mib,
        device=config.device, backend=config.placement.backend, threads=config.threads,
    ) as ranks:  # fmt: skip

        def compute_alone(count: int) -> None:
            for mine, seconds in zip(alone, ranks.call("compute", count), strict=True):
                mine += seconds

        steps: list[list[Step]] = record(ranks, config.steps, compute_alone)
        parameters, buckets = ranks.call("parameters")[0], ranks.call("buckets")[0]
        return RecordedSteps(ranks.pids, parameters, buckets, steps, alone)


def report(config: StepTimelineConfig, run: RecordedSteps) -> str:
    """Write the picture, the trace and the moments, and return the summary to print."""
    from ddp.timeline.figure import plot_step

    origin = min(rank.began for rank in run.steps[0])
    steps = [[rank.since(origin) for rank in step] for step in run.steps]
    parts = [divide(step) for step in steps]
    title, shown = _title(config, run), median_step(steps)
    plot_step(config.output / "timeline.png", steps[shown], parts[shown], run.parameters, run.buckets, title)
    write_trace(config.output / "trace.json", trace_events(run, steps))
    facts = {"parameters": run.parameters, "buckets": run.buckets, "backward_alone": run.alone}
    write_steps(config.output, config, facts, steps, parts)
    return summary(config.output, [title, *table(ROWS, parts), *_sentences(config, run, parts)], steps)


def _title(config: StepTimelineConfig, run: RecordedSteps) -> str:
    from ddp.by_hand.buckets import MIB

    sizes = [f"{sum(bucket.values()) / MIB:.1f}" for bucket in run.buckets]
    shown = sizes if len(sizes) <= MOST_SIZES else [*sizes[:MOST_SIZES], "..."]
    ranks = f"{counted(config.ranks, 'rank')} of {counted(config.threads, 'thread')}"
    if config.placement.gpus:
        ranks = str(config.placement)
    return (
        f"{config.model}, global batch {config.batch_size}, {ranks}, all-reduce: {config.all_reduce}, "
        f"{counted(len(sizes), 'bucket')} of {', '.join(shown)} MiB"
    )


ROWS = {
    "step": "step",
    "data": "  data",
    "forward": "  forward",
    "backward": "  backward",
    "compute": "    until the last gradient is ready",
    "exposed": "    then all-reduce, exposed",
    "waiting": "    then waiting for slower ranks",
    "optimizer": "  optimizer",
    "all_reduce": "all-reduce, all buckets",
    "hidden": "  hidden behind backward",
}


def _sentences(config: StepTimelineConfig, run: RecordedSteps, steps: list[list[OverlapParts]]) -> list[str]:
    """Sum up the table over all ranks, with medians over the steps."""
    shares = [sum(rank.hidden for rank in step) / sum(rank.all_reduce for rank in step) for step in steps]
    hidden = Spread.of([100 * share for share in shares])
    exposed, waiting, compute = (
        1e3 * statistics.median(statistics.fmean(getattr(rank, name) for rank in step) for step in steps)
        for name in ("exposed", "waiting", "compute")
    )
    alone = 1e3 * statistics.median(map(statistics.fmean, zip(*run.alone, strict=True)))
    shared = "GPU" if config.placement.gpus else "cores"
    return [
        f"hidden: {hidden:.0f} % of the time of the all-reduces, behind the computation of gradients; {exposed:.1f} ms of a step "
        f"are exposed, and for {waiting:.1f} ms more the ranks wait for the slowest",
        f"all-reduces share the {shared} with the computation that hides them: all gradients are ready after {compute:.1f} ms of "
        f"backward, and after {alone:.1f} ms without communication: {compute / alone:.2f} times as long",
    ]


def trace_events(run: RecordedSteps, steps: list[list[Step]]) -> list[Event]:
    """All steps in Chrome's trace event format: a process per rank, with its computation above its all-reduces."""
    from ddp.timeline.figure import lanes

    events: list[Event] = []
    for rank, pid in enumerate(run.pids):
        taken = [step[rank] for step in steps]
        compute: Lane = (pid, pid)
        names = ["compute", "all-reduce", *("more all-reduce",) * max(max(lanes(step.sent)) for step in taken)]
        for position, name in enumerate(names):
            events += lane_names((pid, pid + position), f"rank {rank}", name, rank, position)
        for number, step in enumerate(taken):
            spans = {
                "data": (step.began, step.loaded),
                "forward": (step.loaded, step.forwarded),
                "backward": (step.forwarded, step.returned),
                "wait": (step.computed, step.returned),
                "optimizer": (step.returned, step.ended),
            }
            events.append(complete(f"step {number + 1}", step.began, step.ended, compute, "step"))
            events += [complete(name, *span, compute, "part") for name, span in spans.items()]
            for name, moment in zip(run.parameters, step.ready, strict=True):
                events.append(
                    {**at(moment, compute), "ph": "i", "s": "t", "name": f"{name} is ready", "cat": "gradient"}
                )
            for index, (sending, lane) in enumerate(zip(step.sent, lanes(step.sent), strict=True)):
                facts = {"bytes": sum(run.buckets[index].values()), "parameters": list(run.buckets[index])}
                track = (pid, pid + 1 + lane)
                name = f"bucket {index + 1}"
                events.append(complete(name, sending.started, sending.ended, track, "all-reduce", **facts))
    return events


if __name__ == "__main__":
    main()
