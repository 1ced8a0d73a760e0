"""ddp/by_hand: tensors of every layout, and what a program may do to parameters and gradients beside the wrapper."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from ddp.by_hand import HandwrittenDistributedDataParallel, NaiveDistributedDataParallel
from ddp.conformance.expectations import error_of, expect_same
from ddp.conformance.networks import layers
from ddp.conformance.steps import alone, average, backward, gradients, one_pass
from tests.support.on_ranks import as_tests

ENGINES: tuple[Callable[..., Any], ...] = (NaiveDistributedDataParallel, HandwrittenDistributedDataParallel)


class OfEveryLayout(nn.Module):
    """Parameters and buffers with gaps, with repeated elements, in dtypes that gloo does not send, and with lazy signs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype)

        self.strided = nn.Parameter(draw(4, 6)[:, ::2])
        self.conjugated = nn.Parameter(draw(3, 2, dtype=torch.complex64).conj())
        self.negated = nn.Parameter(draw(2, dtype=torch.complex64).conj().imag)
        self.frozen = nn.Parameter(draw(4, 6)[1:3, 1::3], requires_grad=False)
        self.empty = nn.Parameter(draw(0, 3))
        for name, buffer in {
            "gaps": draw(6, 8)[::2, ::3],
            "turned": draw(3, 5).t(),
            "expanded": draw(4, 1).expand(4, 3),
            "short": draw(5).mul(9).to(torch.int16),
            "eight_bits": draw(5).to(torch.float8_e4m3fn),
            "a_scalar": draw().conj(),
        }.items():
            self.register_buffer(name, buffer)
        with torch.inference_mode():
            self.register_buffer("inferred", draw(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = (x @ self.strided.t()[:, :3]).to(torch.complex64) @ self.conjugated
        return hidden.abs() * self.negated + self.empty.sum()


def tensors_of_every_layout_are_those_of_rank_0_and_their_gradients_averages() -> None:
    for engine in ENGINES:
        network, first = OfEveryLayout(dist.get_rank()), OfEveryLayout(0)
        strides = [tensor.stride() for tensor in network.state_dict().values()]
        model = engine(network)
        for (name, mine), expected in zip(network.state_dict().items(), first.state_dict().values(), strict=True):
            assert torch.equal(mine, expected), f"{engine}: {name}"
        assert strides == [tensor.stride() for tensor in network.state_dict().values()]
        for number in range(2):
            network.zero_grad()
            backward(model, number)
            expect_same(gradients(network), average(alone(first, one_pass(number))))


def tensors_that_cannot_be_sent_are_named() -> None:
    for engine in ENGINES:
        for layout, tensor in {
            "sparse_coo": torch.eye(3).to_sparse(),
            "sparse_csr": torch.eye(3).to_sparse_csr(),
            "qint8": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        }.items():
            network = layers(3, 2)
            network.register_buffer("odd", tensor)
            text = str(error_of(lambda: engine(network)))  # noqa: B023
            assert text.startswith(f"odd is {layout} and cannot be sent to other ranks: turn it into a dense"), text


def gradients_with_gaps_are_averaged_by_the_naive_wrapper() -> None:
    network = layers(3, 2)
    expected = average(alone(network))
    network[0].weight.grad = torch.zeros(2, 6)[:, ::2] if dist.get_rank() else torch.zeros(3, 2).t()
    backward(NaiveDistributedDataParallel(network))
    expect_same(gradients(network), expected)


def parameters_that_were_loaded_in_place_of_others_are_named() -> None:
    for engine in ENGINES:
        for names in (["0.weight", "0.bias", "2.weight", "2.bias"], ["2.bias"]):
            network = layers(3, 5, 2)
            options = {} if engine is NaiveDistributedDataParallel else {"find_unused_parameters": len(names) == 1}
            model = engine(network, **options)
            state = network.state_dict()
            network.load_state_dict({name: state[name].clone() for name in names}, strict=False, assign=True)
            text = str(error_of(lambda: backward(model)))  # noqa: B023
            if engine is NaiveDistributedDataParallel:
                assert text.startswith(f"{names[0]} was replaced, unfrozen or copied after it was wrapped"), text
            else:
                named = (
                    f"{len(names)} parameters were converted or replaced after they were wrapped: {', '.join(names)}."
                )
                assert named in text, text


def parameters_that_are_unfrozen_later_are_refused() -> None:
    for engine, text in zip(ENGINES, ("2.weight was replaced, unfrozen", "now require gradients"), strict=True):
        network = layers(3, 5, 2)
        network[2].requires_grad_(False)
        model = engine(network)
        network[2].requires_grad_(True)
        assert text in str(error_of(lambda: backward(model)))  # noqa: B023


def a_backward_pass_that_is_compiled_alone_is_refused() -> None:
    for engine in ENGINES:
        model = engine(layers(3, 2))
        loss = model(torch.ones(1, 3)).sum()
        with compiled_autograd._enable(lambda graph: graph):
            error = str(error_of(loss.backward))
            assert "compiled autograd traces backward" in error, f"{engine}: {error}"


def forward_around_the_wrapper_is_said_once() -> None:
    network = layers(3, 2)
    model = HandwrittenDistributedDataParallel(network)
    backward(model)
    with model.no_sync():
        backward(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        backward(model)
        assert not caught
        for _ in range(3):
            backward(model.module)
    assert len(caught) == 1
    assert "call the wrapper, model(x), and not model.module(x)" in str(caught[0].message)
    del model, caught
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(network)  # without the wrapper


failed, test_program = as_tests(
    [
        tensors_of_every_layout_are_those_of_rank_0_and_their_gradients_averages,
        tensors_that_cannot_be_sent_are_named,
        gradients_with_gaps_are_averaged_by_the_naive_wrapper,
        parameters_that_were_loaded_in_place_of_others_are_named,
        parameters_that_are_unfrozen_later_are_refused,
        a_backward_pass_that_is_compiled_alone_is_refused,
        forward_around_the_wrapper_is_said_once,
    ]
)
