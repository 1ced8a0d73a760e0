"""Parameters of every kind: shared, frozen, sparse, of other dtypes and shapes; autocast and loss scaling."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import expect, expect_averages, expect_same
from ddp.conformance.networks import layers
from ddp.conformance.steps import EACH_ALONE, alone, average, gradients, inputs, loss_of


@check
def a_weight_of_two_layers_is_averaged_once(wrap: Wrap) -> None:
    """A tied weight has two names, but one gradient: the sum of both uses, divided by the number of ranks once."""
    network = layers(3, 3, 3)
    network[2].weight = network[0].weight
    expect_averages(wrap, network, bucket_cap_mb=EACH_ALONE)


@check
def a_layer_that_is_called_twice_is_averaged_with_both_uses(wrap: Wrap) -> None:
    """Its gradient is the sum of both calls, which is there only after the second of them in the backward pass."""
    shared = layers(3, 3)[0]
    network = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared)
    expect_averages(wrap, network)


@check
def frozen_parameters_get_no_gradient(wrap: Wrap) -> None:
    """A parameter that does not require gradients has none afterwards: an optimizer with weight decay would change it."""
    network = layers(3, 4, 4, 2)
    network[2].requires_grad_(False)
    expect_averages(wrap, network)


def _embed(network: nn.Module) -> None:
    rank = dist.get_rank()
    network(torch.tensor([rank, rank + 1, rank])).square().sum().backward()


@check
def sparse_gradients_are_averaged_row_by_row(wrap: Wrap) -> None:
    """Ranks have gradients of different rows; the average has all of these rows, and is still sparse."""
    torch.manual_seed(0)
    network = nn.Embedding(8, 2, sparse=True)
    dense = nn.Embedding(8, 2, _weight=network.weight.detach().clone())
    model = wrap(network)
    _embed(model)
    gradient = network.weight.grad
    assert gradient is not None
    expect_same([gradient.to_dense()], average(alone(dense, _embed)))
    expect(gradient.is_sparse, "the average of sparse gradients is dense")


@check
def sparse_and_dense_gradients_travel_side_by_side(wrap: Wrap) -> None:
    """An embedding with sparse gradients below a linear layer: both are averaged, in every step."""
    network = nn.Sequential(nn.Embedding(8, 3, sparse=True), layers(3, 2))
    dense = copy.deepcopy(network)
    dense[0].sparse = False  # type: ignore[assignment]
    expected = average(alone(dense, _embed))
    model = wrap(network)
    for _ in range(3):
        model.zero_grad()
        _embed(model)
        expect_same([g if g is None else g.to_dense() for g in gradients(network)], expected)


class _OwnParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rows = nn.ParameterList([torch.ones(3), torch.ones(3)])
        self.named = nn.ParameterDict({"shift": torch.zeros(3)})

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.scale * x * self.rows[0] * self.rows[1] + self.named["shift"]
        return output


@check
def parameters_outside_of_layers_are_averaged(wrap: Wrap) -> None:
    """Parameters of the module itself and in a ParameterList or ParameterDict count as those of layers do."""
    expect_averages(wrap, _OwnParameters())


@check
def complex_gradients_are_averaged(wrap: Wrap) -> None:
    """Real and imaginary parts are both averaged."""
    torch.manual_seed(0)
    network = nn.Linear(3, 2, dtype=torch.complex64)

    def step(module: nn.Module) -> None:
        module(inputs().to(torch.complex64)).abs().sum().backward()

    expected = average(alone(network, step))
    step(wrap(network))
    expect_same([torch.view_as_real(network.weight.grad)], [torch.view_as_real(expected[0])])  # type: ignore[arg-type]


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
