"""Mutants for the checks of forward and backward passes."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.ddp.conformance.mutant_bases import AverageEach, TorchDDP


class DividesByTheForwardPasses(AverageEach):
    passes = 0

    def before_forward(self) -> None:
        self.passes += 1

    def average(self, gradient: Tensor) -> None:
        super().average(gradient)
        gradient /= self.passes

    def finish(self) -> None:
        super().finish()
        self.passes = 0


class DetachesTheGradient(TorchDDP):
    def after_forward(self, output: Any) -> Any:
        output.register_hook(lambda gradient: gradient.detach())
        return output


class ScalesTheLoss(AverageEach):
    """Divides the loss's gradient, and not those of parameters."""

    def after_forward(self, output: Any) -> Any:
        output.register_hook(lambda gradient: gradient / dist.get_world_size())
        return output

    def average(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)


class TakesAnyLayerForANewPass(AverageEach):
    """A forward pass calls off what the one before has announced; but this is called for layers, too."""

    announced = False

    def prepare(self) -> None:
        for layer in self.module.modules():
            layer.register_forward_pre_hook(self.begin)

    def begin(self, *_: Any) -> None:
        """A pass begins."""
        self.announced = False

    def after_forward(self, output: Any) -> Any:
        self.announced = True
        return output

    def finish(self) -> None:
        if self.announced:
            super().finish()


class AveragesAtTheEndOfTheFirst(AverageEach):
    """The first gradient asks for a call at the end of backward: of the inner one, if there is one."""

    def prepare(self) -> None:
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.schedule)

    def outputs(self, output: Any) -> list[Tensor]:
        return []


class ForwardCallsOffBackward(AverageEach):
    """A forward pass is a new step: what was scheduled before it is dropped."""

    def before_forward(self) -> None:
        self.called_off = True

    def schedule(self, gradient: Tensor) -> None:
        self.called_off = False
        super().schedule(gradient)

    def finish(self) -> None:
        if not self.called_off:
            super().finish()


class WaitsForEveryBackward(AverageEach):
    """Averages when as many backward passes as forward passes are over."""

    open = 0

    def before_forward(self) -> None:
        self.open += 1

    def finish(self) -> None:
        self.open -= 1
        if self.open <= 0:
            super().finish()


class GivesAView(TorchDDP):
    def prepare(self) -> None:
        self._set_ddp_sink_clone(False)


class CallsForwardDirectly(TorchDDP):
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.forward(*inputs, **kwargs)


MUTANTS = {
    "two_forward_passes_may_share_a_backward_pass": DividesByTheForwardPasses,
    "a_gradient_penalty_is_averaged_too": DetachesTheGradient,
    "autograd_grad_leaves_the_gradients_alone": AverageEach,  # after autograd.grad, too
    "the_gradient_of_an_input_is_this_ranks_own": ScalesTheLoss,
    "layers_may_be_checkpointed": TakesAnyLayerForANewPass,
    "layers_may_be_checkpointed_with_a_backward_pass_of_their_own": AveragesAtTheEndOfTheFirst,
    "the_whole_wrapper_may_be_checkpointed": ForwardCallsOffBackward,
    "an_output_may_be_thrown_away": WaitsForEveryBackward,
    "the_loss_may_be_kept_in_an_attribute": AverageEach,  # hooks outputs only
    "the_output_may_be_changed_in_place": GivesAView,
    "hooks_of_the_wrapper_run": CallsForwardDirectly,
    # of another topic
    "backward_hooks_of_modules_see_local_gradients": ScalesTheLoss,
}
