"""Averages: after backward, every rank's gradients are the average over the ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import expect, expect_averages, expect_same, expect_training_of_one_process
from ddp.conformance.networks import layers
from ddp.conformance.steps import (
    EACH_ALONE,
    alone,
    average,
    backward,
    gradients,
    inputs,
    loss_of,
    of_all_ranks,
    one_pass,
    passes,
)


@check
def gradients_are_the_average_of_the_ranks(wrap: Wrap) -> None:
    """After backward, every .grad is the average of what the ranks computed alone."""
    expect_averages(wrap, layers(3, 5, 2), steps=[backward])


@check
def every_step_averages(wrap: Wrap) -> None:
    """The fifth step averages as the first does: buckets are rebuilt and reused in between."""
    expect_averages(wrap, layers(3, 5, 2), steps=list(map(one_pass, range(5))))


@check
def training_equals_one_process_with_the_whole_batch(wrap: Wrap) -> None:
    """Five steps with momentum come to the weights of one process that sees all ranks' samples."""
    expect_training_of_one_process(wrap, [[number] for number in range(5)])


@check
def every_rank_counts_the_same_whatever_its_batch_size(wrap: Wrap) -> None:
    """A rank with more samples has no more weight: the average is over ranks, not over samples."""
    batch = inputs(samples=1 + 3 * dist.get_rank())
    expect_averages(wrap, layers(3, 5, 2), steps=[lambda model: loss_of(model(batch)).backward()])


@check
def a_nan_on_one_rank_reaches_all(wrap: Wrap) -> None:
    """Values that are not finite are not filtered: the scaler or the loop must see it, and on every rank."""
    network = layers(3, 2)
    model = wrap(network)
    batch = inputs()
    if dist.get_rank() == 1:
        batch[0, 0] = math.nan
    loss_of(model(batch)).backward()
    for parameter in network.parameters():
        nans = 0 if parameter.grad is None else int(parameter.grad.isnan().sum())
        expect(nans == parameter.numel(), f"{nans} of {parameter.numel()} elements of the gradient are nan")


@check
def large_fp16_gradients_do_not_overflow(wrap: Wrap) -> None:
    """Gradients of 40,000 on every rank average to 40,000, though their sum has no place in fp16: divide, then add."""
    network = nn.Linear(4, 1, bias=False).half()
    model = wrap(network)
    model(torch.full((1, 4), 40_000.0, dtype=torch.float16)).sum().backward()
    expect_same(gradients(network), [torch.full((1, 4), 40_000.0, dtype=torch.float16)])


@check
def double_precision_is_kept(wrap: Wrap) -> None:
    """Gradients in float64 are averaged in float64: differences of 1e-12 survive."""
    network = nn.Linear(3, 2, bias=False).double()
    model = wrap(network)
    model(torch.full((1, 3), 1 + 1e-12 * (1 + dist.get_rank()), dtype=torch.float64)).sum().backward()
    gradient = network.weight.grad
    expected = 1 + 1e-12 * (1 + dist.get_world_size()) / 2
    error = math.inf if gradient is None else (gradient - expected).abs().max().item()
    expect(error < 1e-14, f"the average is off by {error:.3g}")


@check
def parameters_of_several_dtypes_are_all_averaged(wrap: Wrap) -> None:
    """One network may have weights in float32, float64, bfloat16 and float16; each gradient keeps its weight's."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    network = nn.ModuleList([nn.Linear(3, 1, bias=False, dtype=dtype) for dtype in dtypes])
    model = wrap(_Each(network))
    model(torch.full((1, 3), 1.0 + dist.get_rank())).backward()
    expected = 1 + sum(range(dist.get_world_size())) / dist.get_world_size()
    for dtype, gradient in zip(dtypes, gradients(network), strict=True):
        mean = math.nan if gradient is None or gradient.dtype != dtype else gradient.double().mean().item()
        expect(abs(mean - expected) < 0.01, f"the gradient in {dtype} is {mean} instead of {expected}")


class _Each(nn.Module):
    """The sum of what several layers make of the same input, each in its own dtype."""

    def __init__(self, networks: nn.ModuleList) -> None:
        super().__init__()
        self.networks = networks

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = [one(inputs.to(next(one.parameters()).dtype)) for one in self.networks]
        return torch.stack([output.sum().float() for output in outputs]).sum()


class _Odd(nn.Module):
    """A parameter without dimensions, one without elements, and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layer = layers(3, 2)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs: Tensor) -> Any:
        return self.scale * self.layer(inputs) + self.empty.sum()


@check
def scalar_and_empty_parameters_are_averaged_too(wrap: Wrap) -> None:
    """A parameter may have no dimensions (a temperature), or no elements."""
    expect_averages(wrap, _Odd())


@check
def channels_last_weights_are_averaged(wrap: Wrap) -> None:
    """A gradient that does not lie in rows is averaged element by element, and comes back in its own order."""
    torch.manual_seed(0)
    network = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    images = inputs(width=27).view(4, 3, 3, 3).to(memory_format=torch.channels_last)
    expect_averages(wrap, network, steps=[lambda model: loss_of(model(images)).backward()])


@check
def parameters_with_gaps_in_memory_are_averaged(wrap: Wrap) -> None:
    """Every second column of a larger tensor is a parameter, too: rank 0's values are sent, and gradients averaged, by element."""
    network = nn.Linear(3, 5)
    network.weight = nn.Parameter(torch.full((5, 6), float(dist.get_rank()))[:, ::2])
    expect_averages(wrap, network, steps=[lambda model: model(inputs()).sum().backward()])
    expect_same([network.weight], [torch.zeros(5, 3)], "weight")


@check
def gradients_have_the_strides_of_their_parameters(wrap: Wrap) -> None:
    """A channels-last weight keeps a channels-last gradient, or optimizers would walk two orders at once."""
    network = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 5))
    network = network.to(memory_format=torch.channels_last)
    model = wrap(network, gradient_as_bucket_view=True)
    for _ in range(2):
        loss_of(model(inputs(width=27).view(4, 3, 3, 3))).backward()
        for name, parameter in network.named_parameters():
            strides = None if parameter.grad is None else parameter.grad.stride()
            expect(strides == parameter.stride(), f"{name} has strides {parameter.stride()}, its gradient {strides}")


@check
def gradients_zeroed_in_place_are_averaged_afresh(wrap: Wrap) -> None:
    """With zero_grad(set_to_none=False), .grad stays the same tensor, and the next step still averages."""
    network = layers(3, 5, 2)
    model = wrap(network)
    for number in range(3):
        expected = average(alone(network, one_pass(number)))
        model.zero_grad(set_to_none=False)
        backward(model, number)
        expect_same(gradients(network), expected, f"step {number}'s gradient")


@check
def gradients_add_up_over_synchronized_steps(wrap: Wrap) -> None:
    """Without zero_grad, a second average is added to the first."""
    expect_averages(wrap, layers(3, 5, 2), steps=[passes(0, 1)])


@check
def gradients_may_be_replaced_between_steps(wrap: Wrap) -> None:
    """Who puts another tensor in the place of .grad finds it there, with the next average added, also with views."""
    network = layers(3, 5, 2)
    model = wrap(network, gradient_as_bucket_view=True)
    backward(model, 0)
    second = average(alone(network, one_pass(1)))
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, 7)
    backward(model, 1)
    expect_same(gradients(network), [7 + gradient for gradient in second])


@check
def gradients_may_be_views_of_the_buckets(wrap: Wrap) -> None:
    """gradient_as_bucket_view=True saves the memory of one copy: small gradients lie side by side in one storage."""
    network = layers(3, 5, 2)
    expect_averages(wrap, network, gradient_as_bucket_view=True)
    storages = {p.grad.untyped_storage().data_ptr() for p in network.parameters() if p.grad is not None}
    expect(len(storages) == 1, f"4 small gradients lie in {len(storages)} storages")


@check
def averages_are_the_same_bits_on_every_rank(wrap: Wrap) -> None:
    """The ranks' gradients agree in every bit, or their weights would drift apart in a long training."""
    network = layers(3, 64, 64, 2)
    model = wrap(network, bucket_cap_mb=EACH_ALONE)
    backward(model)
    everyone = of_all_ranks([None if gradient is None else gradient.tolist() for gradient in gradients(network)])
    different = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    expect(not different, f"ranks {different} have other bits than rank 0")
