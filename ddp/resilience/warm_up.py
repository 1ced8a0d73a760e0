"""A backward pass that is thrown away, before the first step.

DDP rebuilds its buckets after the first backward pass, in the order in which gradients became ready. With three ranks or more,
the order in which a gradient is summed over the ranks depends on its place in the bucket. A resumed run, whose first step is not
the first, would otherwise differ in the last bit.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from common.errors import UsageError
from common.training.precision import autocast
from ddp.job import Job


def warm_up(job: Job) -> None:
    """Take one forward and backward pass on an empty batch, and drop the gradients. A collective.

    Whoever calls it restores the buffers that the forward pass changes.

    :raises UsageError: on every rank, if the forward pass writes to a frozen parameter
    """
    device = job.env.device
    frozen = _frozen(job)
    with unchanged_attributes(job.named_module), autocast(device, job.config.precision):
        logits = job.model(job.data.to_input(job.empty_batch().images.to(device), job.config.memory_format))
    logits.float().sum().backward()
    job.optimizer.zero_grad(set_to_none=True)
    with job.env.fail_together():
        if changed := [name for name, total in _frozen(job).items() if total != frozen[name]]:
            raise UsageError(
                f"forward writes to the frozen parameter {changed[0]}, which no skipped step restores and no rank shares: "
                "register it as a buffer"
            )


def _frozen(job: Job) -> dict[str, str]:
    """A sum over each frozen parameter, by name; in words, where nan is nan."""
    return {
        name: str(one.detach().to(torch.complex128).abs().sum().item())
        for name, one in job.named_module.named_parameters()
        if not one.requires_grad
    }


@contextlib.contextmanager
def unchanged_attributes(network: nn.Module) -> Iterator[None]:
    """A block after which the modules' own attributes are what they were before it: numbers, and the content of tensors,
    containers and objects.

    A forward pass may count in Python. (Parameters, buffers and submodules are not touched.)
    """
    torch_s_own = vars(nn.Module()).keys()
    before = [
        (vars(module), {name: value for name, value in vars(module).items() if name not in torch_s_own})
        for module in network.modules()
    ]
    shared = {id(one): one for one in (*network.modules(), *network.parameters(), *network.buffers())}
    contents = []
    for value in (value for _, own in before for value in own.values() if not callable(value)):
        with contextlib.suppress(Exception):  # what cannot be copied stays as it is
            contents.append((value, copy.deepcopy(value, shared)))
    try:
        yield
    finally:
        for attributes, own in before:
            for name in attributes.keys() - torch_s_own - own.keys():
                del attributes[name]
            attributes.update(own)
        for value, content in contents:
            if isinstance(value, Tensor):
                value.data.copy_(content.data)
            elif isinstance(value, list | deque | dict | set):
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(content)
            elif hasattr(value, "__dict__"):
                vars(value).update(vars(content))
