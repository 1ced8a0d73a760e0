"""ddp/by_hand: the words of its errors, which are the same on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

import ddp.by_hand
from common.distributed.agreement import RanksDiffer
from ddp.by_hand import HandwrittenDistributedDataParallel, NaiveDistributedDataParallel
from ddp.conformance.expectations import error_of, expect_same
from ddp.conformance.networks import Branches, layers
from ddp.conformance.steps import EACH_ALONE, alone, average, backward, gradients, of_all_ranks, one_pass
from tests.support.on_ranks import as_tests

Wrap = HandwrittenDistributedDataParallel


def expect_error(kind: type[Exception], text: str, action: Callable[[], Any]) -> None:
    error = error_of(action)
    assert isinstance(error, kind), error
    messages = of_all_ranks(str(error))
    assert text in messages[0]
    assert messages == messages[:1] * dist.get_world_size()


def modules_that_differ() -> None:
    rank = dist.get_rank()
    buffered = layers(3, 2)
    if rank == 1:
        buffered.register_buffer("mask", torch.zeros(3))
    columns = nn.Parameter(torch.zeros(3, 2).t() if rank else torch.zeros(2, 3))
    reordered = nn.ParameterDict([(name, nn.Parameter(torch.zeros(1))) for name in ("ab" if rank else "ba")])
    described = "0.weight is float32 [2, 3] with strides [3, 1]"
    for module, text in (
        (layers(3, 4 if rank == 2 else 2), f"{described} on ranks 0 and 1, but float32 [4, 3] with strides [3, 1] on rank 2"),
        (layers(3, 2, *[2] * (rank == 0)), "2.weight is float32 [2, 2] with strides [2, 1] on rank 0, but missing on ranks 1 and 2"),
        (layers(3, 2).requires_grad_(rank == 0), "strides [3, 1], without gradient on ranks 1 and 2"),
        (layers(3, 2).to(torch.float64 if rank == 1 else torch.float32), f"{described} on ranks 0 and 2, but float64"),
        (nn.ParameterList([columns]), "but float32 [2, 3] with strides [1, 2] on ranks 1 and 2"),
        (buffered, "mask is missing on ranks 0 and 2, but float32 [3] with strides [1], without gradient on rank 1"),
        (reordered, "their parameters are in another order"),
    ):  # fmt: skip
        expect_error(RanksDiffer, text, lambda: Wrap(module))  # noqa: B023


def settings_that_differ_or_cannot_be() -> None:
    rank, same = dist.get_rank(), layers(3, 2)
    caps = "bucket_cap_mb is 1 on rank 0, but 2 on rank 1 and 3 on rank 2"
    expect_error(RanksDiffer, caps, lambda: Wrap(same, bucket_cap_mb=1 + rank))
    for option in ("find_unused_parameters", "static_graph"):
        text = f"{option} is True on rank 0, but False on ranks 1 and 2"
        expect_error(RanksDiffer, text, lambda: Wrap(same, **{option: rank == 0}))  # type: ignore[arg-type] # noqa: B023
    nothing = "Sequential has no parameter to train: DistributedDataParallel is not needed"
    expect_error(RuntimeError, nothing, lambda: Wrap(nn.Sequential(nn.ReLU())))
    expect_error(RuntimeError, nothing, lambda: Wrap(layers(3, 2).requires_grad_(False)))
    for gpus in ([0, 1], [0], [torch.device("cuda", 0)]):
        text = f"device_ids={gpus} must name the module's GPU, but it is on cpu"
        expect_error(ValueError, text, lambda: Wrap(same, device_ids=gpus))  # noqa: B023


def optimizers_that_step_in_backward() -> None:
    """As torch's tutorial has it, registered before and after wrapping. torch's own DDP lets the replicas drift apart."""
    text = "SGD.step() was called in a backward pass, with gradients that are not averaged over the ranks yet"

    def step_in_backward(network: nn.Module) -> None:
        for parameter in network.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())

    for wrap in (Wrap, NaiveDistributedDataParallel):
        before, after, torchs = layers(3, 2), layers(3, 2), layers(3, 2)
        step_in_backward(before)
        _apply_optimizer_in_backward(torch.optim.SGD, torchs.parameters(), {"lr": 0.1})
        models = [wrap(network) for network in (before, after, torchs)]
        step_in_backward(after)
        for model in models:
            expect_error(RuntimeError, text, lambda: backward(model))  # noqa: B023


def an_optimizer_of_another_model_may_step_in_backward() -> None:
    first, second = Wrap(layers(3, 2)), Wrap(layers(3, 2))
    backward(first)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    next(iter(second.parameters())).register_hook(lambda _: optimizer.step() and None)
    backward(second)
    parts = of_all_ranks([parameter.tolist() for parameter in first.parameters()])
    assert parts == parts[:1] * dist.get_world_size()


def what_is_not_offered() -> None:
    expect_error(NotImplementedError, "use ddp.by_hand.JoinableDistributedDataParallel", Wrap(layers(3, 2)).join)
    text = "use HandwrittenDistributedDataParallel"
    expect_error(AttributeError, text, lambda: getattr(ddp.by_hand, "DistributedDataParallel"))  # noqa: B009


def passes_that_leave_a_parameter_out() -> None:
    network = Branches()
    expected = average(alone(network, one_pass(0, 0, 1, 2)))
    model = Wrap(network, bucket_cap_mb=EACH_ALONE)
    text = (
        "backward gave no gradient to 2 of 6 parameters: branches.1.weight, branches.1.bias. This rank's loss does not "
        "depend on them: pass find_unused_parameters=True and no static_graph, or freeze them before wrapping"
    )
    for _ in range(2):
        expect_error(RuntimeError, text, lambda: one_pass(0, 0, 2)(model))
        network.zero_grad()
        one_pass(0, 0, 1, 2)(model)  # and training can go on
        expect_same(gradients(network), expected)
        network.zero_grad()
    text = "8 of 10 parameters: branches.1.weight, branches.1.bias, branches.2.weight, branches.2.bias, branches.3.weight, ...."
    expect_error(RuntimeError, text, lambda: one_pass(0, 0)(Wrap(Branches(5))))


def parameters_that_two_checkpoints_share() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = layers(3, 3), layers(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            x = checkpoint(self.block, self.stem(x), use_reentrant=True)
            return checkpoint(self.block, x, use_reentrant=True)

    error = str(error_of(lambda: backward(Wrap(Shared()))))
    assert re.match(r"the gradient of block\.0\.(weight|bias) became ready more .*static_graph=True", error), error


def future_of(value: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def raising(state: Any, bucket: Any) -> Any:
    raise ArithmeticError("of the hook's own")


def power_sgd_over_gloo_with_several_buckets() -> None:
    state = PowerSGDState(None, start_powerSGD_iter=2)
    for options in ({"bucket_cap_mb": 1e-5}, {"find_unused_parameters": True}):
        model = Wrap(layers(3, 2, 2), **options)
        text = "PowerSGD over gloo hangs with several buckets"
        expect_error(NotImplementedError, text, lambda: model.register_comm_hook(state, powerSGD_hook))  # noqa: B023
    Wrap(layers(3, 2, 2), bucket_cap_mb=1).register_comm_hook(state, powerSGD_hook)


def hooks_that_do_not_give_what_they_should() -> None:
    mistakes: list[tuple[Any, type[Exception], str]] = [
        (lambda _, bucket: bucket.buffer(), TypeError, "must return a future of a tensor, not Tensor"),
        (lambda _, bucket: future_of(bucket.buffer()[1:]), RuntimeError, "invalid for input of size 7"),
        (raising, ArithmeticError, "of the hook's own"),
        (lambda _, bucket: future_of(bucket.buffer()).then(lambda done: 1 / 0), Exception, "division by zero"),
    ]
    for hook, kind, text in mistakes:
        model = Wrap(layers(3, 2))
        model.register_comm_hook(None, hook)
        for _ in range(2):  # also when one pass has ended in it
            expect_error(kind, text, lambda: backward(model))  # noqa: B023


failed, test_program = as_tests(
    [
        modules_that_differ,
        settings_that_differ_or_cannot_be,
        optimizers_that_step_in_backward,
        an_optimizer_of_another_model_may_step_in_backward,
        what_is_not_offered,
        passes_that_leave_a_parameter_out,
        parameters_that_two_checkpoints_share,
        power_sgd_over_gloo_with_several_buckets,
        hooks_that_do_not_give_what_they_should,
    ],
    world_size=3,
)
