"""Refused, though it can be done"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from ddp.conformance.differences.program import TwoLayers, grad, hang_for_two_seconds, inputs, linear, shown


def all_delayed(DDP: Any) -> Iterator[str]:
    """`delay_all_reduce_named_params` with all parameters that are trained

    The first forward pass fails. (Without a frozen parameter, already the constructor does: it then finds no device.) Why:
    `__init__` returns early (`_delay_all_reduce_all_params`), before it sets `_lazy_init_ran`, which `_pre_forward` asks for.

    With torch's: leave out one parameter.
    """
    network, first = TwoLayers(), linear()
    network.b.weight.requires_grad_(False)
    model = DDP(
        network,
        delay_all_reduce_named_params=[("a.weight", network.a.weight)],
        param_to_hook_all_reduce=first.weight,
    )
    model(first(inputs())).backward()
    yield f"gradient: {grad(network.a.weight)}"


def delayed_in_float64(DDP: Any) -> Iterator[str]:
    """`delay_all_reduce_named_params` with float64

    Why: `_register_delay_all_reduce_hook` allocates `torch.zeros(...)`, which is float32 whatever the parameters are; bfloat16
    fails in the same way.

    With torch's: leave out the option.
    """
    network = TwoLayers().double()
    model = DDP(
        network,
        delay_all_reduce_named_params=[("b.weight", network.b.weight)],
        param_to_hook_all_reduce=network.a.weight,
    )
    model(inputs().double()).backward()
    yield f"a: {grad(network.a.weight)}, b: {grad(network.b.weight)}"


def hook_of_another_form(DDP: Any) -> Iterator[str]:
    """Communication hooks that are not plain functions

    A `functools.partial`, a function whose second argument has another name, and one whose annotations are strings, as all are
    below `from __future__ import annotations`. Why: `_check_comm_hook` asks for `hook.__name__`, for
    `signature.parameters["bucket"]`, and for the very class as its annotation.

    With torch's: `lambda state, bucket: hook(state, bucket)`.
    """

    def annotated(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        return allreduce_hook(state, bucket)

    hooks = {
        "partial": functools.partial(allreduce_hook),
        "another name": lambda state, gradients: allreduce_hook(state, gradients),
        "annotated": annotated,
    }
    for name, hook in hooks.items():
        network = linear()
        model = DDP(network)
        try:
            model.register_comm_hook(None, hook)
            model(inputs()).backward()
            yield f"{name}: {grad(network.weight)}"
        except Exception as error:
            yield f"{name}: {shown(error)}"


def mixed_precision(DDP: Any) -> Iterator[str]:
    """`mixed_precision` on a CPU

    torch built for CUDA cannot make the wrapper where there is no GPU. The module is left with buffers in `buffer_dtype`, even
    those that count in integers. Why: `__init__` makes a `torch.Stream()`, which is one of the accelerator that torch was built
    for. Before that, `_cast_buffers` has converted every buffer.

    With torch's: `torch.autocast("cpu", torch.bfloat16)`.
    """
    network = nn.Sequential(linear(), nn.BatchNorm1d(1))
    config = _MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    try:
        model = DDP(network, mixed_precision=config)
        model(torch.cat([inputs(), 2 * inputs()])).sum().backward()
        yield f"the gradient's dtype: {next(network.parameters()).grad.dtype}"  # type: ignore[union-attr]
    except Exception as error:
        yield shown(error)
    yield f"num_batches_tracked: {network.get_buffer('1.num_batches_tracked').dtype}"


def optimizer_in_backward(DDP: Any) -> Iterator[str]:
    """`_apply_optimizer_in_backward` on a CPU

    A step of 0.1 times the average gradient of 2 makes the weight 0.8. Why: `_apply_optim_in_backward_hook` makes a
    `torch.Stream()`, of the accelerator that torch was built for.

    With torch's: step after backward.
    """
    network = linear()
    _apply_optimizer_in_backward(torch.optim.SGD, network.parameters(), {"lr": 0.1})
    model = DDP(network)
    model(inputs()).backward()
    yield f"weight: {network.weight.item():.1f}"


def output_of_an_own_class(DDP: Any) -> Iterator[str]:
    """`find_unused_parameters` with an output of an own class

    Why: `_find_tensors` finds no tensor in the object, so all parameters count as unused, and then become ready.

    With torch's: return tensors in tuples, lists, dicts or dataclasses.
    """

    class Output:
        def __init__(self, y: Tensor) -> None:
            self.y = y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> Output:
            return Output(self.layer(x))

    network = Model()
    model = DDP(network, find_unused_parameters=True)
    model(inputs()).y.backward()
    yield f"gradient: {grad(network.layer.weight)}"


def parameter_outside_forward(DDP: Any) -> Iterator[str]:
    """`find_unused_parameters` with a parameter that the loss uses and the forward pass does not

    A regularizer, or a learnt temperature of the loss. Why: `Reducer::search_unused_parameters` starts at the outputs, so `b`
    counts as unused, and then becomes ready.

    With torch's: compute the loss within the module's forward.
    """
    network = TwoLayers()
    model = DDP(network, find_unused_parameters=True)
    (model(inputs(), "a") + network.b(inputs())).backward()
    yield f"a: {grad(network.a.weight)}, b: {grad(network.b.weight)}"


def reentrant_checkpoint(DDP: Any) -> Iterator[str]:
    """`find_unused_parameters` with a reentrant checkpoint

    Why: the graph of the checkpointed part does not exist when `Reducer::search_unused_parameters` runs, so its parameters count
    as unused, and then become ready. Issue #24005.

    With torch's: `checkpoint(..., use_reentrant=False)`.
    """

    class Checkpointed(TwoLayers):
        def forward(self, x: Tensor, which: str = "ab") -> Tensor:
            return self.b(checkpoint(self.a, x, use_reentrant=True))  # type: ignore[no-any-return]

    network = Checkpointed()
    model = DDP(network, find_unused_parameters=True)
    model(inputs().requires_grad_()).backward()
    yield f"a: {grad(network.a.weight)}, b: {grad(network.b.weight)}"


def two_forwards(DDP: Any) -> Iterator[str]:
    """`find_unused_parameters` with two forward passes and one backward pass

    One wrapper, two tasks, one backward pass of the sum of their losses. Why: the second `prepare_for_backward` forgets what the
    first forward pass used; `a` counts as unused, and then becomes ready. Issues #60844 and #105723.

    With torch's: call the model once, with both batches.
    """
    network = TwoLayers()
    model = DDP(network, find_unused_parameters=True)
    (model(inputs(), "a") + model(inputs(), "b")).backward()
    yield f"a: {grad(network.a.weight)}, b: {grad(network.b.weight)}"


def two_wrappers(DDP: Any) -> Iterator[str]:
    """Two wrappers of one module in one backward pass, with `gradient_as_bucket_view`

    Without the option, torch's come to the same 4. Why: each wrapper's reducer makes `.grad` a view into its own bucket, and
    `Reducer::finalize_bucket_dense` refuses the view of the other.

    With torch's: `gradient_as_bucket_view=False`.
    """
    network = linear()
    one, other = (DDP(network, gradient_as_bucket_view=True) for _ in range(2))
    (one(inputs()) + other(inputs())).backward()
    yield f"the sum of both: {grad(network.weight)}"


def unused_sparse_embedding(DDP: Any) -> Iterator[str]:
    """`find_unused_parameters` with a sparse embedding that one rank does not use

    Rank 1 raises and rank 0 waits. Why: `Reducer::mark_variable_ready_sparse` takes no missing gradient, while
    `mark_variable_ready_dense` takes zeros. Issue #80496.

    With torch's: let every rank use each sparse embedding, if only by `0 * embedding(index).sum()`.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.embedding = linear(), nn.Embedding(3, 1, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y + self.embedding(torch.tensor([0])) if dist.get_rank() == 0 else y

    network = Model()
    model = DDP(network, find_unused_parameters=True)
    hang_for_two_seconds()
    model(inputs()).backward()
    assert network.embedding.weight.grad is not None
    yield f"gradient: {network.embedding.weight.grad.to_dense().flatten().tolist()}"
