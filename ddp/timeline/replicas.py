"""Steps of the hand-written DDP: when each gradient is computed and copied, and each bucket's all-reduce."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from common.distributed.process_group import DistEnv
from common.reporting.run_figures import COLORS
from common.reporting.timing import Spread
from common.training.models import build_model, to_device
from ddp.all_reduce.choice import build_all_reduce
from ddp.by_hand.buckets import MIB
from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel
from ddp.timeline.config import StepTimelineConfig
from ddp.timeline.figure import LATE, OPTIMIZER, WAIT, Look
from ddp.timeline.parts import COMPUTE, Parts
from ddp.timeline.recording import RecordedBackend, RecordedCollectives, StepRecorder

IMAGE_SHAPE, CLASSES = (1, 28, 28), 10  # as a glyph's
MOST_SIZES = 6  # bucket sizes that the title lists
BUCKET_COLORS = (COLORS[0], COLORS[2], COLORS[3], COLORS[4])
DATA, FORWARD, COPY = "#d9dde0", "#a9b8c4", "0.25"


class StepsOfRank(StepRecorder):
    """Trains with the hand-written DDP on random images. A lap of the backward pass computes a gradient, or copies it, or waits."""

    def __init__(self, env: DistEnv, config: StepTimelineConfig) -> None:
        super().__init__(env)
        torch.manual_seed(env.rank)  # DDP broadcasts rank 0's parameters
        self._device, self._samples = env.device, config.batch_size // config.ranks
        network = to_device(build_model(config.model, IMAGE_SHAPE, CLASSES), env.device, torch.channels_last)
        self._names = {parameter: name for name, parameter in network.named_parameters()}
        recorded = RecordedBackend if config.all_reduce == "backend" else RecordedCollectives
        self.model = HandwrittenDistributedDataParallel(
            network,
            broadcast_buffers=False,
            bucket_cap_mb=config.bucket_mib,
            all_reduce=recorded(build_all_reduce(config.all_reduce), self),
        )
        for parameter, name in self._names.items():
            # DDP's hook is on the node that accumulates the gradient. The node calls its hooks after those of the parameter.
            parameter.register_post_accumulate_grad_hook(functools.partial(self.lap, name))
            get_gradient_edge(parameter).node.register_hook(functools.partial(self.lap, "copy"))
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9, fused=True)

    def facts(self) -> dict[str, Any]:
        """``buckets``, in the order of their all-reduces: each maps its parameters to the bytes of the gradients."""
        buckets = [bucket.parameters.values() for bucket in self.model.reducer.buckets]
        return {"buckets": [{self._names[p]: p.nbytes for p in bucket} for bucket in buckets]}

    def compute(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` backward passes without synchronization. All ranks start together."""
        self.start_together()
        for _ in range(steps):
            with self.model.no_sync():
                loss = self.forward(self.next_batch())
                with self.recorder.span("alone", COMPUTE):
                    loss.backward()
            self.optimizer.zero_grad(set_to_none=True)
        return [span.seconds for span in self.recorder.read(self.recorder.take()) if span.name == "alone"]

    def next_batch(self) -> tuple[Tensor, Tensor]:
        images, labels = torch.rand(self._samples, *IMAGE_SHAPE), torch.randint(CLASSES, (self._samples,))
        return images.to(self._device, memory_format=torch.channels_last), labels.to(self._device)

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.lap("wait")

    def name_of(self, buffer: Tensor) -> str:
        buckets = self.model.reducer.buckets
        return bucket_name(next(index for index, bucket in enumerate(buckets) if bucket.buffer is buffer))


def title(config: StepTimelineConfig, facts: Mapping[str, Any]) -> str:
    """Name the model and its buckets."""
    sizes = [f"{sum(bucket.values()) / MIB:.1f}" for bucket in facts["buckets"]]
    return (
        f"{config.model}, global batch {config.batch_size}, {config.placement}, "
        f"all-reduce: {config.summed_by}, "
        f"{len(sizes)} bucket{'s' * (len(sizes) > 1)} of {', '.join(sizes[:MOST_SIZES])} MiB"
    )


def sentences(config: StepTimelineConfig, facts: Mapping[str, Any], steps: Sequence[Sequence[Parts]]) -> list[str]:
    """Sum up the table over all ranks, with medians over the steps."""
    shares = [sum(rank["hidden"] for rank in step) / sum(rank["all_reduce"] for rank in step) for step in steps]
    hidden = Spread.of([100 * share for share in shares])
    exposed, waiting, compute = (
        1e3 * statistics.median(statistics.fmean(rank[name] for rank in step) for step in steps)
        for name in ("exposed", "waiting", "compute")
    )
    alone = 1e3 * statistics.median(map(statistics.fmean, facts["backward_alone"]))
    shared = "GPU" if config.placement.gpus else "cores"
    return [
        f"hidden: {hidden:.0f} % of the time of the all-reduces, behind the computation of gradients; {exposed:.1f} ms of a step "
        f"are exposed, and for {waiting:.1f} ms more the ranks wait for the slowest",
        f"all-reduces share the {shared} with the computation that hides them: all gradients are ready after {compute:.1f} ms of "
        f"backward, and after {alone:.1f} ms without communication: {compute / alone:.2f} times as long",
    ]


def heading(parts: Parts) -> str:
    """Sum up a rank's step."""
    step, total, hidden, exposed, late = (
        f"{1e3 * parts[name]:.1f} ms" for name in ("step", "all_reduce", "hidden", "exposed", "waiting")
    )
    return f"step {step}; all-reduce {total}: {hidden} hidden, {exposed} exposed; waits {late} for the slowest"


def look(facts: Mapping[str, Any]) -> Look:
    """A bucket and its gradients have the same color."""
    colors: dict[str, Any] = {"data": DATA, "forward": FORWARD, "copy": COPY, "wait": WAIT, "optimizer": OPTIMIZER}
    for index, bucket in enumerate(facts["buckets"]):
        colors |= dict.fromkeys((*bucket, bucket_name(index)), BUCKET_COLORS[index % len(BUCKET_COLORS)])
    legend = {
        "data": DATA,
        "forward": FORWARD,
        "a gradient, and the all-reduce of its bucket": BUCKET_COLORS[0],
        "copied to its bucket, sent": COPY,
        "sent, but not yet by the slowest rank": {**LATE, "edgecolor": "0.4"},
        "waits": WAIT,
        "optimizer": OPTIMIZER,
    }
    return Look(colors, legend)


def bucket_name(index: int) -> str:
    """Count from 1."""
    return f"bucket {index + 1}"
