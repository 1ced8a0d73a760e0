"""One step of a sharded model as a picture: what is gathered, computed, reduced and freed, and the memory below it.

    python -m ddp.timeline --strategy zero3
    python -m ddp.timeline --strategy zero2 --all-reduce shared-memory

Trains the transformer of common/training/gpt.py with AdamW on random tokens. Each of its blocks is a unit of ddp/sharded/; the
embeddings and the head are in the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.distributed.worker_group import WorkerGroup
from common.reporting.trace_events import write_trace
from ddp.timeline.config import StepTimelineConfig
from ddp.timeline.sharded.parts import ShardedParts, divide
from ddp.timeline.steps import counted, median_step, record, summary, table, write_steps

if TYPE_CHECKING:
    from ddp.timeline.sharded.recording import ShardedStep

OF_A_REPLICA = 4  # times its parameters: these, their gradients, and AdamW's two moments


@dataclass(frozen=True)
class ShardedRun:
    """The recorded steps of one training.

    :param pids: the process id of each rank
    :param units: bytes of the parameters of each unit, the root first
    :param steps: for each step its moments on each rank
    """

    pids: list[int]
    units: dict[str, int]
    steps: list[list[ShardedStep]]

    @property
    def replica(self) -> int:
        """Bytes that a rank would hold without sharding: parameters, gradients and the optimizer's state."""
        return OF_A_REPLICA * sum(self.units.values())


def measure(config: StepTimelineConfig) -> ShardedRun:
    """Record training steps."""
    from ddp.timeline.sharded.recording import ShardedRecorder

    with WorkerGroup(config.ranks, ShardedRecorder, config, threads=config.threads) as ranks:
        steps: list[list[ShardedStep]] = record(ranks, config.steps)
        return ShardedRun(ranks.pids, ranks.call("units")[0], steps)


def report(config: StepTimelineConfig, run: ShardedRun) -> str:
    """Write the picture, the trace and the moments, and return the summary to print."""
    from ddp.timeline.sharded.figure import plot_step
    from ddp.timeline.sharded.trace import trace_events

    origin = min(rank.began for rank in run.steps[0])
    steps = [[rank.since(origin) for rank in step] for step in run.steps]
    parts = [divide(step) for step in steps]
    title, shown = _title(config, run), median_step(steps)
    plot_step(config.output / "timeline.png", steps[shown], parts[shown], run.units, run.replica, title)
    write_trace(config.output / "trace.json", trace_events(run.pids, steps))
    write_steps(config.output, config, {"units": run.units, "replica": run.replica}, steps, parts)
    return summary(config.output, [title, *table(ROWS, parts), *_sentences(run, parts)], steps)


def _title(config: StepTimelineConfig, run: ShardedRun) -> str:
    parameters = sum(run.units.values()) / 4  # of four bytes
    return (
        f"{config.strategy}, a transformer of {parameters / 1e6:.1f} M parameters in {len(run.units)} units, "
        f"{config.batch_size} sequences of {config.length} tokens, {counted(config.ranks, 'rank')} of "
        f"{counted(config.threads, 'thread')}, all-reduce: {config.all_reduce}"
    )


ROWS = {
    "step": "step",
    "forward": "  forward",
    "backward": "  backward",
    "computing": "    both without waits",
    "wait_gather": "    waits for gathers",
    "wait_reduce": "    waits for reduce-scatters",
    "optimizer": "  optimizer",
    "gather": "gathers",
    "reduce_scatter": "reduce-scatters",
    "hidden": "  of both, hidden",
    "exposed": "  of both, exposed",
}


def _sentences(run: ShardedRun, steps: list[list[ShardedParts]]) -> list[str]:
    """Sum up the memory of all steps and ranks."""
    peak = max(its.peak for step in steps for its in step) / 2**20
    rest = max(its.rest for step in steps for its in step) / 2**20
    replica, largest = run.replica / 2**20, max(run.units.values()) / 2**20
    return [
        f"memory of a rank, without activations: at most {peak:.1f} MiB, {rest:.1f} MiB between steps; a replica has "
        f"{replica:.1f} MiB. The largest unit has {largest:.1f} MiB of parameters"
    ]
