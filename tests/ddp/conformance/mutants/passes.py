"""Mutants for the checks of forward and backward passes."""

# mypy: disable-error-code="no-untyped-call, no-any-return"
from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ddp.by_hand.outputs import tensors_in
from tests.ddp.conformance.mutant_bases import AverageEach, TorchDDP


class DividesByTheForwardPasses(AverageEach):
    passes = 0

    def before_forward(self) -> None:
        self.passes += torch.is_grad_enabled()

    def _average_gradients(self) -> None:
        super()._average_gradients()
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            parameter.grad /= self.passes
        self.passes = 0


class AveragesOncePerForward(AverageEach):
    def _prepare_for_backward(self, output: Any) -> None:
        self._armed = True
        super()._prepare_for_backward(output)

    def _average_gradients(self) -> None:
        if self._armed:
            super()._average_gradients()
        self._armed = False


class DetachesTheGradient(TorchDDP):
    def after_forward(self, output: Any) -> Any:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient.detach())
        return output


class AveragesAfterEveryBackward(AverageEach):
    """Also after torch.autograd.grad, which gives zeros to parameters without gradient."""


class ScalesTheLoss(TorchDDP):
    def prepare(self) -> None:
        self.register_comm_hook(None, _sum)

    def after_forward(self, output: Any) -> Any:
        output.register_hook(lambda gradient: gradient / dist.get_world_size())
        return output


def _sum(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with types
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


class TakesAnyLayerForANewPass(AverageEach):
    """A forward pass calls off what the one before has announced; but this is called for layers, too."""

    def prepare(self) -> None:
        self._announced = False
        for layer in self.module.modules():
            layer.register_forward_pre_hook(self._begin)

    def _begin(self, *_: Any) -> None:
        self._announced = False

    def after_forward(self, output: Any) -> Any:
        self._announced = True
        return output

    def _average_gradients(self) -> None:
        if self._announced:
            super()._average_gradients()


class AveragesAtTheEndOfTheFirst(AverageEach):
    """The first gradient asks for a call at the end of backward: of the inner one, if there is one."""

    def prepare(self) -> None:
        for parameter in self.module.parameters():
            parameter.register_post_accumulate_grad_hook(self._first)

    def _prepare_for_backward(self, output: Any) -> None:
        self._asked = False

    def _first(self, _: Tensor) -> None:
        if not self._asked:
            self._asked = True
            Variable._execution_engine.queue_callback(self._average_gradients)


class ForwardCallsOffBackward(AverageEach):
    """A forward pass is a new step: what was scheduled before it is dropped."""

    number = 0

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.number += 1
        output = self.module(*inputs, **kwargs)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _, number=self.number: self._check(number))
        return output

    def _check(self, number: int) -> None:
        def end() -> None:
            if number == self.number:
                self._average_gradients()

        Variable._execution_engine.queue_callback(end)


class WaitsForEveryBackward(AverageEach):
    """Averages when as many backward passes as forward passes are over."""

    open = 0

    def _prepare_for_backward(self, output: Any) -> None:
        self.open += 1
        super()._prepare_for_backward(output)

    def _average_gradients(self) -> None:
        self.open -= 1
        if self.open <= 0:
            super()._average_gradients()


class HooksOutputsOnly(AverageEach):
    """Right but for that."""


class GivesAView(TorchDDP):
    def prepare(self) -> None:
        self._set_ddp_sink_clone(False)


class DoesNotKnowTheOptimizer(TorchDDP):
    def _setup_in_backward_optimizers(self) -> None:
        pass


class KeepsItsOwnWeights(TorchDDP):
    def prepare(self) -> None:
        self._compiled = [copy.copy(self.module)]
        self._compiled[0]._modules = {name: copy.copy(layer) for name, layer in self.module._modules.items()}
        for layer in self._compiled[0]._modules.values():
            assert layer is not None
            layer._parameters = dict(layer._parameters)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._compiled[0](*inputs, **kwargs)


class CallsForwardDirectly(TorchDDP):
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.forward(*inputs, **kwargs)


class MakesPlainTuples(TorchDDP):
    def after_forward(self, output: Any) -> Any:
        return {key: tuple(value) if isinstance(value, tuple) else value for key, value in output.items()}


MUTANTS: dict[str, Any] = {
    "two_forward_passes_may_share_a_backward_pass": DividesByTheForwardPasses,
    "each_of_two_forward_passes_may_have_its_backward_pass": AveragesOncePerForward,
    "a_gradient_penalty_is_averaged_too": DetachesTheGradient,
    "autograd_grad_leaves_the_gradients_alone": AveragesAfterEveryBackward,
    "the_gradient_of_an_input_is_this_ranks_own": ScalesTheLoss,
    "layers_may_be_checkpointed": TakesAnyLayerForANewPass,
    "layers_may_be_checkpointed_with_a_backward_pass_of_their_own": AveragesAtTheEndOfTheFirst,
    "the_whole_wrapper_may_be_checkpointed": ForwardCallsOffBackward,
    "an_output_may_be_thrown_away": WaitsForEveryBackward,
    "the_loss_may_be_kept_in_an_attribute": HooksOutputsOnly,
    "the_output_may_be_changed_in_place": GivesAView,
    "an_optimizer_may_step_within_backward": DoesNotKnowTheOptimizer,
    "functional_call_puts_in_other_weights": KeepsItsOwnWeights,
    "hooks_of_the_wrapper_run": CallsForwardDirectly,
    "outputs_keep_their_types": MakesPlainTuples,
}
