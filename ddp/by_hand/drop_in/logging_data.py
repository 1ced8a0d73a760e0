"""The numbers of ``_get_ddp_logging_data``: settings, and how gradients are bucketed, by torch's names.

Times are not among them: ``python -m ddp.timeline`` and ``python -m ddp.bench`` measure the parts of a step.
"""

from __future__ import annotations

from typing import Any

import torch

from ddp.by_hand.drop_in.hooks import HookedDDP
from ddp.by_hand.drop_in.reducer import DropInReducer, Skipped
from ddp.by_hand.replicas import trained_parameters


class LoggingDDP(HookedDDP):
    """The lesson with ``join``, torch's hooks, and numbers."""

    reducer: DropInReducer
    output_device: int | torch.device | None

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Settings, sizes in bytes, and the parameters' numbers in the order in which their gradients are sent.

        ``iteration`` is the number of the latest backward pass that synchronized, from 0, and ``num_buckets_reduced`` is of that pass.
        """
        trained, buckets, sent = trained_parameters(self.module), self.reducer.buckets, self.reducer.sent
        before = "rebuilt_" if self.reducer.rebuilt else ""
        data: dict[str, Any] = {
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "backend_name": self.process_group.name(),
            "device_ids": ", ".join(map(str, self.device_ids)),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.broadcast_buffers),
            "bucket_cap_bytes": max(self.bucket_limits),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "module_name": type(self.module).__name__,
            "num_parameter_tensors": len(trained),
            "total_parameter_size_bytes": sum(parameter.nbytes for parameter in trained.values()),
            "dtypes": ", ".join(
                sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained.values()})
            ),
            "has_rebuilt_buckets": int(self.reducer.rebuilt),
            "iteration": max(self.reducer.passes - 1, 0),
            "num_buckets_reduced": sum(not isinstance(pending, Skipped) for pending in sent),
            f"{before}bucket_sizes": ", ".join(str(bucket.buffer.nbytes) for bucket in buckets),
        }
        if self._hook_name:
            data["comm_hook"] = self._hook_name
        if self.reducer.rebuilt:
            data["rebuilt_per_bucket_param_indices"] = ", ".join(" ".join(map(str, b.parameters)) for b in buckets)
        return data
