"""ddp/by_hand: the checks of ddp/conformance are the semantic tests of the lesson, and of the naive wrapper in plain cases."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ddp.conformance.check import CHECKS, Check
from ddp.conformance.runner import PASS, WRONG, Result, Runner

RANKS = [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
# The lesson's answers to the checks of what it does not offer.
NOT_OFFERED = {
    "no option forward_sync_buffers": [
        "buffers may go their own ways",
    ],
    "no option init_sync": ["without init sync the weights stay"],
    "no option bucket_cap_mb_list": ["a list gives each bucket its cap"],
    "no option device_mesh": ["a group and a mesh together are refused", "a device mesh is a group"],
    "no option output_device": ["an empty list of devices is accepted"],
    "no option skip_all_reduce_unused_params": ["unused parameters that are the same everywhere need not be sent"],
    "use ddp.by_hand.JoinableDistributedDataParallel": [check.name for check in CHECKS if check.topic == "join"],
    "is sparse: build its embedding with sparse=False": [
        "sparse gradients are averaged row by row",
        "sparse and dense gradients travel side by side",
    ],
    "cannot pickle": [
        "a deep copy and its original train on",
        "a wrapper can be pickled",
        "a moving average of the wrapper needs no other rank",
    ],
    "or pass gradient_as_bucket_view=False": ["a wrapper may stand in another"],
}
# The lesson never learns of these: torch looks for its own class, or moves a parameter.
UNNOTICED = {
    "parameters on two kinds of device are refused",
}
PLAIN = ("averages", "accumulation", "parameters", "passes")
# The naive wrapper's answers in plain cases, beside those to options that it does not have.
NAIVE = {
    "checkpoint with use_reentrant=False": ["layers may be checkpointed with a backward pass of their own"],
}
NAIVE_UNNOTICED = {
    "sparse gradients are averaged row by row",  # they are dense
}


def failures(wrapper: str, ranks: int, checks: Iterable[Check] = CHECKS) -> dict[str, Result]:
    """The checks that do not pass."""
    with Runner(ranks) as runner:
        results = [runner.run(check, f"ddp.by_hand:{wrapper}") for check in checks]
    return {result.check: result for result in results if result.status != PASS}


def assert_refused(failed: dict[str, Result], words: dict[str, list[str]], unnoticed: set[str]) -> None:
    """Checks fail for the reasons that are known, and no others fail."""
    text_of = {check: text for text, checks in words.items() for check in checks}
    assert failed.keys() - unnoticed == text_of.keys()
    assert {check for check, result in failed.items() if result.status == WRONG} <= unnoticed
    for check, text in text_of.items():
        assert text in failed[check].message


@pytest.mark.parametrize("ranks", RANKS)
def test_the_lesson_passes_all_checks_of_what_it_offers(ranks: int) -> None:
    """The lesson passes all checks of the conformance suite but those of what it does not offer.

    Claim (ddp/by_hand/README.md): unused parameters, `no_sync`, hooks and activation checkpointing are as in torch.
    Claim (ddp/by_hand/README.md): a wrapper in a wrapper, and parameters that are converted later, are refused.
    """
    assert_refused(failures("HandwrittenDistributedDataParallel", ranks), NOT_OFFERED, UNNOTICED)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_joinable_lesson_passes_the_checks_of_join(ranks: int) -> None:
    join = [check for check in CHECKS if check.topic == "join"]
    assert failures("JoinableDistributedDataParallel", ranks, join) == {}


def test_the_naive_wrapper_passes_the_checks_of_plain_cases() -> None:
    plain = [check for check in CHECKS if check.topic in PLAIN]
    failed = failures("NaiveDistributedDataParallel", 2, plain)
    no_option = {check for check, result in failed.items() if "no option" in result.message}
    assert_refused({check: failed[check] for check in failed.keys() - no_option}, NAIVE, NAIVE_UNNOTICED)
