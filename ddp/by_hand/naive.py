"""Data parallelism in its simplest form: after backward, one all-reduce per parameter.

    model = NaiveDistributedDataParallel(network)
    model(inputs).sum().backward()  # .grad is now the average over the ranks

    torchrun --nproc_per_node=2 -m ddp.train --strategy naive

It is right, but slow: every all-reduce waits for the one before, small ones cost almost as much as large ones, and none
begins before backward is over. ddp/by_hand/wrapper.py adds buckets and overlap.
"""

import contextlib
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ddp.by_hand import replicas


class NaiveDistributedDataParallel(torch.nn.Module):
    """Averages the gradients of ``module`` over the ranks of the default process group after every backward pass.

    A parameter that a rank did not use counts there as a gradient of zeros. But if a rank uses none at all, nothing starts its
    averaging, and the others wait. The averages of sparse gradients are dense. Buffers are broadcast once, by the constructor.

    :param module: on every rank with the same parameters and buffers; values may differ, since rank 0's are sent to all
    :raises RuntimeError: on every rank, if the modules differ
    :raises NotImplementedError: for a parameter or buffer that cannot be sent
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True  # no_sync turns this off
        # require_backward_grad_sync as it was in the latest forward pass. Backward often runs after the no_sync block has ended.
        self._synchronize = True
        self._latest_pass: int | None = None  # id of the backward pass in which the latest gradient came
        # All ranks must begin with the same weights: averaged gradients keep them equal, but do not make them so.
        replicas.make_equal(module)
        # The parameters that get a hook, by their id().
        self._hooked = {id(parameter): parameter for parameter in replicas.trained_parameters(module).values()}
        this = weakref.proxy(self)  # so that the hooks, which the parameters hold, do not keep this wrapper alive
        for parameter in self._hooked.values():
            hook = parameter.register_post_accumulate_grad_hook(lambda _: this._ready())
            weakref.finalize(self, hook.remove)  # is called when this wrapper is freed
        # If any optimizer steps our parameters while backward still runs, the gradients are not averaged yet: step() raises then.
        replicas.refuse_early_steps(self, self._hooked, replicas.in_backward)

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """``module``'s forward. It decides whether the backward pass from its output averages."""
        replicas.require_hooked(self.module, self._hooked)  # a parameter replaced since would not be averaged
        # (Activation checkpointing repeats forward passes in backward. They decide nothing.)
        if torch.is_grad_enabled() and not replicas.in_backward():
            self._synchronize = self.require_backward_grad_sync
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this block, forward passes lead to backward passes that add to ``.grad`` on this rank alone."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _ready(self) -> None:
        """Called for each gradient. The first one in a backward pass asks autograd to call ``_average_gradients`` when the pass is over."""
        if self._latest_pass != replicas.current_pass():
            if replicas.current_node() is None:  # no node runs: compiled autograd only traces, and would not call back
                raise NotImplementedError("compiled autograd traces backward: compile the module, not its backward")
            if self._synchronize:
                # HACK: nothing public tells when a pass ends, and torch's DDP uses this too. If torch renames it: AttributeError.
                torch.autograd.Variable._execution_engine.queue_callback(self._average_gradients)
            self._latest_pass = replicas.current_pass()

    def _average_gradients(self) -> None:
        if replicas.within_another_pass():  # the inner pass of a reentrant checkpoint has ended; the outer brings more
            raise NotImplementedError("a backward pass within another one: checkpoint with use_reentrant=False")
        # In the same order on every rank: collectives are matched by their order.
        for parameter in replicas.trained_parameters(self.module).values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().to_dense()
            # all_reduce adds up raw memory: take the parameter's layout, which is the same on all ranks. Divide before the sum, which
            # might overflow in fp16.
            parameter.grad = torch.empty_like(parameter).copy_(gradient).div_(dist.get_world_size())
            dist.all_reduce(parameter.grad)
