"""``common.data.pinned``: shared memory is locked for a GPU, and unlocked before it is unmapped."""

from __future__ import annotations

import gc
import os

import pytest

from common.data.pinned import pin_shared
from common.errors import UsageError
from dataloading.loader.buffers import shared
from tests.support.fake_gpu import CUDA, FakeGpu


def test_memory_is_locked_for_as_long_as_the_tensor_lives(fake_gpu: FakeGpu) -> None:
    """Memory is pinned for as long as its tensor lives.

    Claim (dataloading/README.md, 6): shared memory is pinned, and unpinned before it is unmapped.
    """
    memory = shared((100, 30))
    pin_shared(memory, CUDA, "")
    assert fake_gpu.locked == {memory.data_ptr(): 3000}
    del memory
    gc.collect()
    assert not fake_gpu.locked  # it was still mapped as it was unlocked


def test_memory_that_cuda_refuses_is_one_line(fake_gpu: FakeGpu) -> None:
    fake_gpu.status = 2
    with pytest.raises(UsageError) as error:
        pin_shared(shared((1000, 3000)), CUDA, "use less")
    assert str(error.value) == ("3.0 MB of shared memory cannot be pinned for cuda:0 (out of memory): use less")


def test_nothing_is_not_locked(fake_gpu: FakeGpu) -> None:
    pin_shared(shared((0, 3)), CUDA, "")
    assert not fake_gpu.ever_locked


def test_a_forked_process_unlocks_nothing(fake_gpu: FakeGpu) -> None:
    memory = shared((10, 10))
    pin_shared(memory, CUDA, "")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            del memory
            gc.collect()
            status = not fake_gpu.locked  # CUDA cannot be used in a fork
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.gpu
def test_a_gpu_reads_it_while_the_host_goes_on() -> None:
    memory = shared((1 << 20,))
    assert not memory.is_pinned()
    pin_shared(memory, CUDA, "")
    assert memory.is_pinned() and memory[5:].is_pinned()
    assert memory.pin_memory() is memory
    memory.fill_(3)
    assert (memory.to(CUDA, non_blocking=True).cpu() == 3).all()
    del memory
    gc.collect()
    again = shared((1 << 20,))  # as a rule at the same address, which CUDA must have forgotten
    assert not again.is_pinned()
    pin_shared(again, CUDA, "")
    assert again.is_pinned()
