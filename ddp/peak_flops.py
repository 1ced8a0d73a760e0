"""The peak FLOP/s of GPUs in dense matrix products, from their makers' data sheets, and the FLOPs that a model needs.

The share of the peak that a training reaches is its model FLOPs utilization, MFU (Chowdhery et al., PaLM, arXiv 2204.02311,
appendix B). It counts what the model needs and not what was computed: activations that are computed again add nothing.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from common.models.modules import evaluating

# TFLOP/s without sparsity, in fp16 and bf16, in TF32, and in fp32. The first whose pattern is in the GPU's name counts.
PEAKS: dict[str, tuple[float, float, float]] = {
    r"\bB200\b": (2250, 1125, 75),
    r"\bH100 PCIe\b": (756, 378, 51),
    r"\bH100 NVL\b": (835, 418, 60),
    r"\bH[12]00\b": (989, 495, 67),
    r"\bA100\b": (312, 156, 19.5),
    r"\bA10\b": (125, 62.5, 31.2),
    r"\bL40S\b": (362, 183, 91.6),
    r"\bL4\b": (121, 60, 30.3),
    r"\bRTX 4090$": (165, 82.6, 82.6),
    r"\bRTX 3090$": (71, 35.6, 35.6),
    r"\bV100-SXM2\b": (125, 15.7, 15.7),  # which has neither TF32 nor bf16; nor has the next
    r"\bT4\b": (65, 8.1, 8.1),
}
BACKWARD_AND_FORWARD = 3  # a backward pass takes two products for each of the forward pass


def peak_flops(gpu: str, precision: str, tf32: bool) -> float | None:
    """FLOP/s; None for a GPU that is not in the table, or a part of one.

    :param gpu: as ``torch.cuda.get_device_name`` gives it
    :param precision: one of :data:`common.training.precision.PRECISIONS`
    :param tf32: whether fp32 may be rounded to TF32
    """
    if "MIG" in gpu:
        return None
    low, rounded, full = next((peaks for name, peaks in PEAKS.items() if re.search(name, gpu)), (None, None, None))
    teraflops = low if precision != "fp32" else rounded if tf32 else full
    return teraflops and 1e12 * teraflops


@torch.no_grad()
def training_flops(network: nn.Module, inputs: Tensor) -> int:
    """The FLOPs of a forward and a backward pass, by torch's counter: those of matrix products, convolutions and attention.

    A forward pass is taken, without changing the network. It is a collective if the network is sharded.
    """
    from torch.utils.flop_counter import FlopCounterMode  # only where something is measured

    with evaluating(network), FlopCounterMode(display=False) as counter:
        network(inputs)
    return BACKWARD_AND_FORWARD * int(counter.get_total_flops())
