"""What modules hold, and ranks that have built different ones

In torch's, each rank compares the number and the shapes of its parameters with rank 0's. Ours compares names, order, shapes,
strides and dtypes of parameters and buffers, and the wrapper's settings, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.conformance.differences.program import grad, hang_for_two_seconds, inputs, linear


def another_dtype(DDP: Any) -> Iterator[str]:
    """A rank whose parameters have another dtype

    Rank 1 has converted its module to float64. Rank 0 sends weights of 0.1 in float32, and rank 1 takes their bits for a
    float64. Why: `_verify_param_shape_across_processes` compares no dtypes, and gloo takes fewer bytes than it waits for.

    With torch's: compare the parameters' dtypes over the ranks before wrapping.
    """
    network = nn.utils.skip_init(nn.Linear, 1, 2, bias=False)
    nn.init.constant_(network.weight, 0.1)
    if dist.get_rank() == 1:
        network = network.double()
    DDP(network)
    yield "weights: " + ", ".join(f"{weight:.3g}" for weight in network.weight.flatten().tolist())


def another_shape(DDP: Any) -> Iterator[str]:
    """A rank whose layer is wider

    Rank 1 is told of the difference, and rank 0 waits. With more ranks, the others wait too, or go on: each compares its shapes with
    rank 0's alone. Why: `_verify_param_shape_across_processes` broadcasts rank 0's shapes, and an error on one rank reaches no other.

    With torch's: let all ranks build the model from the same settings. torchrun ends the others when a rank fails.
    """
    hang_for_two_seconds()
    DDP(nn.Linear(1, 1 + dist.get_rank()))
    yield "accepted"


def buffer_after_wrapping(DDP: Any) -> Iterator[str]:
    """A buffer that is registered after wrapping

    It is never sent if the module had no buffer when it was wrapped, and before each forward pass if it had any. Why:
    `will_sync_module_buffers` looks at `len(self.modules_buffers)`, which is renewed only where buffers are sent
    (`_sync_buffers`).

    With torch's: register buffers first, then wrap.
    """
    network = linear()
    model = DDP(network)
    network.register_buffer("number", torch.tensor(float(dist.get_rank())))
    model(inputs())
    yield f"number: {network.get_buffer('number').item():g}"


def buffers_of_another_shape(DDP: Any) -> Iterator[str]:
    """A rank with a larger buffer

    Rank 0 sends two elements, and rank 1 has three: the third stays what it was, and the ranks differ. (The other way round,
    gloo aborts the process of rank 1.) Why: `_verify_param_shape_across_processes` is given the parameters, not the buffers.

    With torch's: compare the buffers' shapes over the ranks before wrapping.
    """
    network = linear()
    network.register_buffer("numbers", torch.full((2 + dist.get_rank(),), 1.0 + dist.get_rank()))
    DDP(network)
    yield f"numbers: {network.get_buffer('numbers').tolist()}"


def find_unused_on_one_rank(DDP: Any) -> Iterator[str]:
    """`find_unused_parameters=True` on one rank only

    Rank 0 waits in the first step, and rank 1 in the second. Why: the option decides which collectives follow
    (`Reducer::all_reduce_local_used_map`), and is not compared.

    With torch's: take options from what all ranks share, not from what each one finds.
    """
    network = linear()
    model = DDP(network, find_unused_parameters=dist.get_rank() == 0)
    hang_for_two_seconds()
    for step in range(2):
        network.zero_grad()
        model(inputs()).backward()
        yield f"step {step}: {grad(network.weight)}"


def ignored_parameter(DDP: Any) -> Iterator[str]:
    """A parameter of the outermost module that is to be ignored

    `_set_params_and_buffers_to_ignore_for_model` leaves a parameter to each rank. torch averages the gradient of `scale` all the
    same, though it does not broadcast its value. Why: `_build_params_for_reducer` makes names as
    `f"{module_name}.{param_name}"`, which is `.scale` in the outermost module, and looks for that among the names.

    With torch's: ignore both names, `["scale", ".scale"]`.
    """

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = linear(), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale  # type: ignore[no-any-return]

    network = Scaled()
    DDP._set_params_and_buffers_to_ignore_for_model(network, ["scale"])
    model = DDP(network)
    model(inputs()).backward()
    yield f"scale: {grad(network.scale)}, layer: {grad(network.layer.weight)}"


def parameters_in_another_order(DDP: Any) -> Iterator[str]:
    """Ranks with the same parameters in another order

    torch averages the gradient of `a` on rank 0 with that of `b` on rank 1, and broadcasts weights likewise. The gradient of `a`
    should be 2 and that of `b` 20. It happens where a module is built from a `set`, or from files in the order in which a disk
    lists them. Why: `_verify_param_shape_across_processes` compares shapes alone.

    With torch's: compare `[name for name, _ in module.named_parameters()]` over the ranks (`all_gather_object`) before wrapping.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("ab", "ba")[dist.get_rank()]:
                self.add_module(name, linear())

        def forward(self, x: Tensor) -> Tensor:
            return self.get_submodule("a")(x) + 10 * self.get_submodule("b")(x)  # type: ignore[no-any-return]

    network = Model()
    model = DDP(network)
    model(inputs()).backward()
    for name, parameter in sorted(network.named_parameters()):
        yield f"{name}: {grad(parameter)}"
