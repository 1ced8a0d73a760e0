"""What ``_get_ddp_logging_data`` tells: how gradients are bucketed, and how long the parts of a step take, by torch's names."""

from __future__ import annotations

import statistics
import time
from typing import Any

from torch import nn

from ddp.by_hand.buckets import Bucket
from ddp.by_hand.drop_in.reducer import DropInReducer

FIRST = 10  # backward passes that are always recorded
PARTS = {
    "forward_compute_time": ("forward", "backward"),
    "backward_compute_time": ("backward", "computed"),
    "backward_comm_time": ("all-reduce", "end"),
    "backward_compute_comm_overlap_time": ("all-reduce", "computed"),
}


class StepTimes:
    """The times of backward passes that synchronized, in nanoseconds."""

    def __init__(self) -> None:
        self.sample_rate = 100  # after the first passes, one of so many is recorded
        self.iteration = 0
        self._forward = 0
        self._taken: dict[str, list[int]] = {part: [] for part in PARTS}

    def forward_begins(self) -> None:
        self._forward = time.perf_counter_ns()

    def backward_ended(self, reducer: DropInReducer) -> None:
        """Take the reducer's moments."""
        self.iteration += 1
        if self.iteration > FIRST and self.iteration % self.sample_rate:
            return
        moments = {"forward": self._forward, "end": time.perf_counter_ns(), **reducer.moments}
        for part, (begin, end) in PARTS.items():
            if begin in moments:
                self._taken[part].append(max(0, moments[end] - moments[begin]))

    def data(self) -> dict[str, int]:
        """Each part's latest time, and its mean under ``avg_``."""
        taken = {part: times for part, times in self._taken.items() if times}
        means = {f"avg_{part}": round(statistics.fmean(times)) for part, times in taken.items()}
        return {**{part: times[-1] for part, times in taken.items()}, **means, "iteration": self.iteration}


def bucket_data(
    module: nn.Module, trained: dict[str, nn.Parameter], buckets: list[Bucket], rebuilt: bool
) -> dict[str, Any]:
    """Sizes in bytes, and the parameters' numbers in the order in which their gradients are sent."""
    sizes = ", ".join(str(bucket.buffer.nbytes) for bucket in buckets)
    indices = ", ".join(" ".join(map(str, bucket.parameters)) for bucket in buckets)
    found: dict[str, Any] = {
        "module_name": type(module).__name__,
        "num_parameter_tensors": len(trained),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in trained.values()),
        "dtypes": ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained.values()})),
        "has_rebuilt_buckets": int(rebuilt),
        "num_buckets_reduced": len(buckets),
    }
    if rebuilt:
        return {**found, "rebuilt_bucket_sizes": sizes, "rebuilt_per_bucket_param_indices": indices}
    return {**found, "bucket_sizes": sizes}
