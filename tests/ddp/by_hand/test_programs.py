"""ddp/by_hand: whatever a training script does between two steps, ours ends with the same bits as torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.ddp.by_hand.programs import Program, compare, compare_in_shared_memory, programs
from tests.ddp.by_hand.wrappers import Case
from tests.support.ranks import run_in_group

# Programs that once ended with other bits.
FORWARD_FAILS_AFTER_EVALUATION = Program(
    Case("scalars", optimizer="sgd"), actions=(("evaluate", 1), ("fail_in_forward", 7))
)


def compared(some: list[Program]) -> list[str]:
    return [found for program in some if (found := compare(program))]


def assert_equal(some: list[Program], compared: Callable[[list[Program]], list[str]] = compared) -> None:
    for found in run_in_group(compared, 2, some, timeout_s=300):
        assert found == []


def compared_in_shared_memory(some: list[Program]) -> list[str]:
    return [found for program in some if (found := compare_in_shared_memory(program))]


# torch's own DDP fails in some: a forward pass writes to buffers that an earlier pass's backward needs.
not_of_old = pytest.mark.skipif(torch.__version__ < "2.14", reason="torch's own DDP fails in some programs before 2.14")


@not_of_old
@settings(max_examples=2, phases=[Phase.generate])
@given(st.lists(programs(), min_size=8, max_size=8))
def test_random_programs_give_the_same_bits_as_torch(some: list[Program]) -> None:
    """Random programs give the same bits as torch.

    Claim (ddp/by_hand/README.md): random training programs give torch's bits.
    """
    assert_equal([FORWARD_FAILS_AFTER_EVALUATION, *some])


@not_of_old
@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=50, phases=[Phase.generate])
@given(st.lists(programs(), min_size=10, max_size=10))
def test_500_random_programs_give_the_same_bits_as_torch(some: list[Program]) -> None:
    """500 random programs give the same bits as torch.

    Claim (ddp/by_hand/README.md): five hundred random training programs give torch's bits.
    """
    assert_equal(some)


@not_of_old
@settings(max_examples=1, phases=[Phase.generate])
@given(st.lists(programs(), min_size=6, max_size=6))
def test_random_programs_in_shared_memory_give_the_same_bits(some: list[Program]) -> None:
    assert_equal(some, compared_in_shared_memory)


@not_of_old
@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=50, phases=[Phase.generate])
@given(st.lists(programs(), min_size=10, max_size=10))
def test_500_random_programs_in_shared_memory_give_the_same_bits(some: list[Program]) -> None:
    """torch's DDP with our hook, in shared memory, gives the bits of torch's DDP.

    Claim (ddp/all_reduce/README.md): five hundred random programs give torch's bits in shared memory.
    """
    assert_equal(some, compared_in_shared_memory)
