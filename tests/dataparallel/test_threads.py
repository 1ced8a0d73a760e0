"""dataparallel/threads.py: a thread per device: its modes, its share of the cores, and its lifetime."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.parallel import HandwrittenDataParallel
from dataparallel.threads import DeviceThreads
from tests.dataparallel.modules import (
    CPU,
    assert_same,
    gradients,
    linear,
    loss_of,
    outcome,
    rows,
    wrapped,
)


def threads(count: int) -> DeviceThreads:
    return DeviceThreads([CPU] * count)


# Calls


def test_each_device_keeps_its_thread() -> None:
    """Each device keeps its thread, in whatever order the calls before have ended.

    However the calls before have ended: here the last one first.

    Claim (dataparallel/README.md): on GPUs, gradients are sent on the streams of the forward pass, and each device
    keeps its thread.
    """
    workers, names = threads(3), set()
    for _ in range(5):
        ended = [threading.Event() for _ in range(4)]
        ended[3].set()

        def call(number: int, ended: list[threading.Event] = ended) -> tuple[int, str]:
            assert ended[number + 1].wait(timeout=20)
            ended[number].set()
            return number, threading.current_thread().name

        names |= set(workers.run([functools.partial(call, number) for number in range(3)]))
    assert sorted(names) == [(0, "replica-0_0"), (1, "replica-1_0"), (2, "replica-2_0")]


def test_all_calls_end_before_an_error_is_raised() -> None:
    ended, failed = [], threading.Event()

    def fail() -> None:
        failed.set()
        raise ValueError("no good")

    def wait() -> None:
        failed.wait(timeout=20)
        time.sleep(0.05)
        ended.append(True)

    with pytest.raises(ValueError, match=r"^replica 0 on cpu: no good$"):
        threads(2).run([fail, wait])
    assert ended


def test_each_gpu_s_thread_launches_a_kernel_before_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a matrix product would find no CUDA context in its thread."""
    ready: dict[int, torch.device] = {}
    monkeypatch.setattr(torch, "zeros", lambda *_, device: ready.setdefault(threading.get_ident(), device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    gpus = [torch.device("cuda", number) for number in range(3)]
    meeting = threading.Barrier(3)

    def call() -> bool:
        meeting.wait(timeout=20)
        return threading.get_ident() in ready

    assert DeviceThreads(gpus).run([call] * 3) == [True] * 3
    assert sorted(device.index for device in ready.values()) == [0, 1, 2]


def test_a_device_that_cannot_be_used_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int, device: torch.device) -> None:
        if device.index == 1:
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        DeviceThreads([torch.device("cuda", number) for number in range(2)]).run([lambda: None] * 2)


# Cores


@pytest.fixture(params=[1, 2, 5])
def cores(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of intra-op threads of this thread and of every new one."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def intra_op_threads_of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_thread_has_its_share_of_the_intra_op_threads(cores: int, count: int) -> None:
    workers = threads(count)
    for _ in range(3):
        assert workers.run([torch.get_num_threads] * count) == [max(1, cores // count)] * count
        assert torch.get_num_threads() == cores
        assert intra_op_threads_of_a_new_thread() == cores


@pytest.mark.parametrize("cores", [12], indirect=True)
def test_threads_within_threads_share_the_share(cores: int) -> None:
    inner = threads(2)

    def call() -> list[int]:
        return [torch.get_num_threads(), *inner.run([torch.get_num_threads] * 2), torch.get_num_threads()]

    assert threads(3).run([call] * 3) == [[4, 2, 2, 4]] * 3
    assert (torch.get_num_threads(), intra_op_threads_of_a_new_thread()) == (cores, cores)


# Modes


class Modes(nn.Module):
    """Returns an output and the modes that it ran in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
        return y, y.is_inference(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


MODES: dict[str, list[Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "none": [],
    "no grad": [torch.no_grad],
    "grad within no grad": [torch.no_grad, torch.enable_grad],
    "inference": [torch.inference_mode],
    "grad within inference": [torch.inference_mode, torch.enable_grad],
    "bfloat16": [lambda: torch.autocast("cpu", torch.bfloat16)],
    "float16 without cache": [lambda: torch.autocast("cpu", torch.float16, cache_enabled=False)],
    "off within on": [lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.autocast("cpu", enabled=False)],
    "bfloat16 without grad": [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)],
}


@pytest.mark.parametrize("name", MODES)
def test_the_caller_s_modes_are_the_replicas_(name: str) -> None:
    """Grad mode and autocast of the caller hold in the replicas.

    Claim (dataparallel/README.md): grad mode and autocast are the caller's; the threads stay.
    """
    module = Modes()
    wrapper, x = wrapped(module, 3), rows(5).detach().float()
    with contextlib.ExitStack() as stack:
        for mode in MODES[name]:
            stack.enter_context(mode())
        assert_same(wrapper(x), module(x))
    assert_same(wrapper(x), module(x))


# Lifetime


def results_of_a_child(wrapper: HandwrittenDataParallel, x: Tensor) -> list[Any]:
    """The outputs and gradients as lists, of a process that is forked from this one."""
    ours, childs = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        output = wrapper(x)
        loss_of(output).backward()
        childs.send([tensor.tolist() for tensor in (output.detach(), *gradients(wrapper)) if tensor is not None])

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    childs.close()
    try:
        assert ours.poll(60)
        with contextlib.suppress(EOFError):  # its exit status tells more
            results = ours.recv()
        child.join(60)
        assert child.exitcode == 0
        return list(results)
    finally:
        child.kill()
        child.join()


class AllAtOnce(nn.Module):
    """A layer that all replicas reach together: at the next hundredth of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Any:
        time.sleep(0.01 - time.time() % 0.01)
        return self.layer(x)


def test_it_works_in_a_forked_child_whose_replicas_all_begin_at_once() -> None:
    """A child that is forked after use in the parent has the parent's outputs and gradients, and leaves the parent as it was.

    Without a renewed autograd engine, some of the children crash.
    """
    wrapper, x = wrapped(AllAtOnce(), 8), rows(16)
    output, grads, _ = outcome(wrapper, x)
    wrapper.zero_grad()
    expected = [tensor.tolist() for tensor in (output, *grads.values())]
    for _ in range(40):
        assert results_of_a_child(wrapper, x) == expected
    assert_same(wrapper(x), output)


def replica_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


def test_the_threads_start_with_the_first_forward_and_end_with_the_wrapper() -> None:
    """The threads start with the first forward and end with the wrapper.

    Claim (dataparallel/README.md): grad mode and autocast are the caller's; the threads stay.
    """
    before = set(replica_threads())
    wrapper = wrapped(linear(), 3)
    assert set(replica_threads()) == before
    wrapper(rows(6)).sum().backward()
    wrapper(rows(6))
    own = set(replica_threads()) - before
    assert len(own) == 3
    del wrapper
    for thread in own:
        thread.join(timeout=20)
        assert not thread.is_alive()
