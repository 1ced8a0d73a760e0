"""The time of a training step, to compare with the time that its batch takes to load."""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

from common.training.models import build_model

CLASSES = 100
STEPS = 5


def measure_step(model: str, batch_size: int, image_shape: tuple[int, int, int], device: torch.device) -> float:
    """Seconds of a forward pass, a backward pass and an SGD step on a batch in memory, in fp32; the median of a few steps.

    :param image_shape: height, width, channels
    """
    height, width, channels = image_shape
    network = build_model(model, (channels, height, width), CLASSES).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(batch_size, channels, height, width, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (batch_size,), device=device)
    seconds = []
    for _ in range(STEPS + 2):  # the first two warm up
        began = time.perf_counter()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])
