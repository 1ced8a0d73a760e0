"""Mutants for the checks of copies."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any

from tests.ddp.conformance.mutant_bases import AtOnce, Together, TorchDDP, torch_with


class SharesItsParameters(TorchDDP):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(self.module)


class LosesItsHooks(TorchDDP):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._remove_autograd_hooks()


MUTANTS = {
    "a_deep_copy_and_its_original_train_on": SharesItsParameters,
    "a_wrapper_can_be_pickled": LosesItsHooks,
    "a_moving_average_of_the_wrapper_needs_no_other_rank": Together,
    "a_dropped_wrapper_is_freed": AtOnce,  # its hooks hold it
    "a_dropped_wrapper_averages_no_more": AtOnce,  # its hooks stay
    # Two wrappers cannot both have the gradients in their buckets.
    "a_wrapper_may_stand_in_another": torch_with(gradient_as_bucket_view=True),
}
