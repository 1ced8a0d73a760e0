"""dataparallel/threads.py: a thread per device: its modes, its share of the cores, and its errors."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.threads import divided_cores, run_in_threads
from tests.dataparallel.modules import CPU, assert_same, rows, wrapped


def test_all_calls_end_before_the_first_error_is_raised() -> None:
    """The calls run at once, and all end before the first one's error is raised, which names the replica and keeps its type."""
    meeting, ended = threading.Barrier(3), []

    def call(number: int) -> None:
        meeting.wait(timeout=20)
        time.sleep(0.05 * number)
        ended.append(number)
        if number:
            raise KeyError(f"no {number}")

    with pytest.raises(KeyError, match="replica 1 on cpu: 'no 1'"):
        run_in_threads([functools.partial(call, number) for number in range(3)], [CPU] * 3)
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize("cores", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_thread_has_its_share_of_the_intra_op_threads(cores: int, count: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        with divided_cores([CPU] * count):
            shares = [torch.get_num_threads(), *run_in_threads([torch.get_num_threads] * count, [CPU] * count)]
        assert shares == [max(1, cores // count)] * (count + 1)
        with ThreadPoolExecutor(1) as pool:
            assert [torch.get_num_threads(), pool.submit(torch.get_num_threads).result()] == [cores, cores]
    finally:
        torch.set_num_threads(before)


class Modes(nn.Module):
    """Returns an output and the modes that it ran in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        return y, y.is_inference(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


MODES: dict[str, list[Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "none": [],
    "grad within no grad": [torch.no_grad, torch.enable_grad],
    "inference": [torch.inference_mode],
    "float16 without cache": [lambda: torch.autocast("cpu", torch.float16, cache_enabled=False)],
    "off within on": [lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.autocast("cpu", enabled=False)],
    "bfloat16 without grad": [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)],
}


@pytest.mark.parametrize("name", MODES)
def test_the_caller_s_modes_are_the_replicas_(name: str) -> None:
    """Grad mode and autocast of the caller hold in the replicas.

    Claim (dataparallel/README.md): grad mode and autocast are the caller's.
    """
    module = Modes()
    wrapper, x = wrapped(module, 3), rows(5).detach().float()
    with contextlib.ExitStack() as stack:
        for mode in MODES[name]:
            stack.enter_context(mode())
        assert_same(wrapper(x), module(x))
