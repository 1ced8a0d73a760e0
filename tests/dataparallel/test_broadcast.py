"""dataparallel/broadcast.py: copies on every device, and gradients that are summed as autograd itself would sum them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import record_function

from dataparallel import broadcast
from dataparallel.broadcast import Broadcast
from tests.dataparallel.modules import CPU


def on_devices(tensors: Sequence[Tensor], count: int) -> list[tuple[Tensor, ...]]:
    """The tensors of each device."""
    flat = Broadcast.apply(record_function, [CPU] * count, *tensors)
    return [flat[number * len(tensors) : (number + 1) * len(tensors)] for number in range(count)]


def test_the_first_device_has_the_tensors_themselves() -> None:
    """The first replica has the module's own tensors.

    Claim (dataparallel/README.md): hooks run once per replica; the first replica has the module's own tensors.
    """
    tensors = [torch.ones(2, requires_grad=True), torch.ones(3)]
    first, second = on_devices(tensors, 2)
    assert [copy.data_ptr() for copy in first] == [tensor.data_ptr() for tensor in tensors]
    assert not {copy.data_ptr() for copy in second} & {tensor.data_ptr() for tensor in tensors}
    assert [copy.requires_grad for copy in (*first, *second)] == [True, False, True, False]
    assert not any(copy.is_leaf for copy in (first[0], second[0]))


@settings(max_examples=60)
@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_a_gradient_is_the_sum_over_the_devices_that_used_the_tensor(data: Any, count: int, devices: int) -> None:
    """A gradient is the sum over the devices that used the tensor.

    Claim (dataparallel/README.md): a parameter's gradient is the sum over the devices.
    """
    tensors = [torch.full((number + 1,), 1.0, requires_grad=True) for number in range(count)]
    weights = torch.arange(1.0, 1 + devices * count).view(devices, count)
    used = torch.tensor(data.draw(st.lists(st.booleans(), min_size=devices * count, max_size=devices * count)))
    used = used.view(devices, count)
    terms = [
        (copy * weights[device, index]).sum()
        for device, own in enumerate(on_devices(tensors, devices))
        for index, copy in enumerate(own)
        if used[device, index]
    ]
    if terms:
        torch.stack(terms).sum().backward()
    for index, tensor in enumerate(tensors):
        if used[:, index].any():
            assert tensor.grad is not None
            assert torch.equal(tensor.grad, torch.full_like(tensor, (weights * used)[:, index].sum().item()))
        else:
            assert tensor.grad is None


def test_gradients_are_sent_on_the_streams_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are sent on the streams of the forward pass.

    Behind the first device's stream, which autograd makes wait for all gradients.

    Claim (dataparallel/README.md): on GPUs, gradients are sent on the streams of the forward pass.
    """
    log: list[str] = []
    stage = "forward"

    class Stream:
        def __init__(self, number: int) -> None:
            self.name = f"{number}'s of {stage}"

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append("off")

    # CPU devices with streams.
    monkeypatch.setattr(broadcast, "current_streams", lambda devices: [Stream(n) for n in range(len(devices))])
    monkeypatch.setattr(broadcast, "on_stream", on)
    weight = torch.ones(2, requires_grad=True)
    copies = on_devices([weight], 3)
    assert log == []
    stage = "autograd"
    torch.stack([(number + 1) * copy.sum() for number, (copy,) in enumerate(copies)]).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [6, 6]
    assert log == [
        *("on 1's of forward", "1's of forward waits for 0's of autograd", "off"),
        *("on 2's of forward", "2's of forward waits for 0's of autograd", "off"),
    ]
