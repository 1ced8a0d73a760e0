"""Automatic mixed precision: which region computes in low precision.

``fp32``: none. ``bf16``: autocast. Its exponent is fp32's, so gradients neither overflow nor vanish and need no scaling.
``fp16``: autocast and a :class:`torch.amp.GradScaler`, since gradients below 6e-8 would become zero. The weights stay fp32.
"""

from __future__ import annotations

import torch

PRECISIONS = ("fp32", "bf16", "fp16")
LOW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The region in which matrix products and convolutions take the low precision. Backward belongs outside it.

    :param precision: one of :data:`PRECISIONS`; in fp32 the region changes nothing
    """
    dtype = LOW_DTYPES.get(precision, torch.bfloat16)
    return torch.autocast(device.type, dtype=dtype, enabled=precision in LOW_DTYPES)
