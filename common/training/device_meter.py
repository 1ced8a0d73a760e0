"""GPU metrics of a window of training steps: how long it works on them, how much memory they take, and its MFU.

The host only queues work, so its clock tells nothing of a step. CUDA events do: they are queued too, and the device notes the
time when it comes to them. Here one stands before and one behind the work on each micro-batch. The time between two micro-batches,
in which the device waits for data or for the host, is in none of these spans.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass

import torch

from common.distributed.dist_env import DistEnv


@dataclass(frozen=True)
class DeviceTotals:
    """A window of steps, over all ranks.

    :param gpu_ms_per_step: that a GPU took for an optimizer step, mean
    :param gpu_busy: share of the time in which a GPU worked on steps, mean
    :param gpu_memory: bytes that tensors took, at most, on the rank that needed most
    :param mfu: share of the GPUs' peak FLOP/s; None where the peak is unknown
    """

    gpu_ms_per_step: float
    gpu_busy: float
    gpu_memory: int
    mfu: float | None

    def as_record(self) -> dict[str, float]:
        """For ``metrics.jsonl``."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        mfu = "" if self.mfu is None else f", {100 * self.mfu:.0f} % MFU"
        return f"{self.gpu_ms_per_step:.1f} ms/step on the GPU{mfu}, {self.gpu_memory / 1e9:.1f} GB"


class DeviceMeter:
    """Measures one GPU.

    :param micro_steps: micro-batches of an optimizer step
    """

    def __init__(self, device: torch.device, micro_steps: int) -> None:
        self._device, self._micro_steps = device, micro_steps
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._is_open = False  # the last span
        self._began = 0.0
        self._flops, self._peak = 0, math.nan

    def measure_mfu(self, flops: int, peak: float | None) -> None:
        """Measure the MFU from now on.

        :param flops: of a forward and a backward pass of a micro-batch
        :param peak: FLOP/s of this GPU, if it is known
        """
        self._flops, self._peak = flops, peak or math.nan

    def begin(self) -> None:
        """Before the work on a micro-batch is queued."""
        if not self._spans:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._began = time.perf_counter()
        self._spans.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self._spans[-1][0].record()
        self._is_open = True

    def end(self) -> None:
        """When all work on it is queued; later calls change nothing."""
        if self._is_open:
            self._spans[-1][1].record()
        self._is_open = False

    def read(self, env: DistEnv) -> DeviceTotals | None:
        """The totals over all ranks, and the beginning of the next window. A collective; the host waits for the device.

        :returns: None if there was no step
        """
        self.end()
        torch.cuda.synchronize(self._device)
        spans, self._spans = self._spans, []
        if not spans:
            return None
        seconds = time.perf_counter() - self._began
        busy_s = sum(begin.elapsed_time(end) for begin, end in spans) / 1e3
        steps, mfu = len(spans) / self._micro_steps, len(spans) * self._flops / (seconds * self._peak)
        peaks = [0.0] * env.world_size
        peaks[env.rank] = torch.cuda.max_memory_allocated(self._device)
        values = torch.tensor([busy_s / steps, busy_s / seconds, mfu, *peaks], dtype=torch.float64, device=self._device)
        of_step, busy, mfu, *peaks = env.sum_over_ranks(values).tolist()
        ranks = env.world_size
        return DeviceTotals(
            1e3 * of_step / ranks, busy / ranks, int(max(peaks)), None if math.isnan(mfu) else mfu / ranks
        )
