"""Precision: autocast, loss scaling, and models that are not float32."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ddp.conformance.check import Wrap, check
from ddp.conformance.tools import (
    alone,
    average,
    backward,
    expect,
    expect_averages,
    expect_same,
    gradients,
    inputs,
    layers,
    loss_of,
    of_all_ranks,
)


def _autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(inputs())
    expect(output.dtype == torch.bfloat16, f"under autocast the output is {output.dtype} instead of torch.bfloat16")
    loss_of(output.float()).backward()


@check
def autocast_leaves_the_averages_in_float32(wrap: Wrap) -> None:
    """Under autocast layers compute in bfloat16, but weights and gradients stay float32 and are averaged as such."""
    expect_averages(wrap, layers(3, 5, 2), steps=[_autocast])


@check
def an_overflow_on_one_rank_skips_the_step_on_all(wrap: Wrap) -> None:
    """An infinite gradient must come out of the average as such: every GradScaler then skips the step and halves its scale."""
    network = layers(3, 5, 2)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    model, scaler = wrap(network), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = loss_of(model(inputs())) * (float("inf") if dist.get_rank() == dist.get_world_size() - 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    expect(scaler.get_scale() == 4.0, f"the scale is {scaler.get_scale():g} instead of 4")
    expect_same([parameter.detach() for parameter in network.parameters()], before, "weight")


@check
def clipping_after_unscaling_is_that_of_one_process(wrap: Wrap) -> None:
    """The norm that is clipped is that of the averages of the unscaled gradients, as if one process had the global batch."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in expected]))
    model, scaler = wrap(network), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(loss_of(model(inputs()))).backward()
    scaler.unscale_(optimizer)
    expect_same([nn.utils.clip_grad_norm_(model.parameters(), float(norm) / 2)], [norm], "norm")
    expect_same(gradients(network), [gradient / 2 for gradient in expected])


@check
def clipping_gives_all_ranks_the_same(wrap: Wrap) -> None:
    """clip_grad_norm_ right after backward sees the averages on every rank, so all clip alike, bit for bit."""
    network = layers(3, 5, 2)
    model = wrap(network)
    backward(model)
    norms = of_all_ranks(nn.utils.clip_grad_norm_(model.parameters(), 0.01).item())
    expect(len(set(norms)) == 1, f"the norms are {norms}")
    everyone = of_all_ranks(gradients(network))
    expect(all(map(torch.equal, everyone[0], everyone[dist.get_rank()])), "the clipped gradients differ")
