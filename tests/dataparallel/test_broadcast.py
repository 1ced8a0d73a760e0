"""dataparallel/broadcast.py: exact copies, and gradients that are summed as autograd itself would sum them."""

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

from dataparallel.broadcast import ALIGNMENT, Broadcast, send
from tests.dataparallel.modules import CPU

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


def strided(shape: Sequence[int], dtype: torch.dtype, layout: str) -> Tensor:
    values = torch.arange(torch.Size(shape).numel()).reshape(tuple(shape)).to(dtype)
    if layout == "channels last":
        return values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 else values
    if layout == "reversed":
        return values.permute(tuple(reversed(range(values.dim()))))
    if layout == "expanded":
        return values.unsqueeze(0).expand(3, *shape)
    if layout == "every other":
        return values[..., ::2] if values.dim() else values
    if layout == "offset":
        return values[1:] if values.dim() else values
    return values


many_tensors = st.lists(
    st.builds(
        strided,
        st.lists(st.integers(0, 3), max_size=4),
        st.sampled_from(DTYPES),
        st.sampled_from(["plain", "channels last", "reversed", "expanded", "every other", "offset"]),
    ),
    max_size=8,
)


@settings(max_examples=100)
@given(many_tensors)
def test_copies_have_the_values_and_the_strides(tensors: list[Tensor]) -> None:
    before = [tensor.clone() for tensor in tensors]
    copies = send(tensors, CPU)
    assert len(copies) == len(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        torch.testing.assert_close(copy, tensor, rtol=0, atol=0)
        assert copy.stride() == tensor.to(CPU, copy=True).stride()
        copy.zero_()
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)


def test_tensors_of_one_dtype_share_a_buffer_with_aligned_starts() -> None:
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(5, 70), torch.ones(())]
    copies = send(tensors, CPU)
    first, other, second, third = copies
    assert {copy.untyped_storage().data_ptr() for copy in (first, second, third)} == {
        first.untyped_storage().data_ptr()
    }
    assert other.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert [copy.storage_offset() for copy in copies] == [0, 0, ALIGNMENT, ALIGNMENT * 7]


def test_a_copy_may_be_changed_after_another_was_saved_for_the_backward_pass() -> None:
    saved, changed = send([torch.ones(3), torch.ones(3)], CPU)
    x = torch.ones(3, requires_grad=True)
    y = x * saved
    changed.add_(1)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1]


def broadcast(tensors: Sequence[Tensor], count: int) -> list[tuple[Tensor, ...]]:
    """The tensors of each device."""
    flat = Broadcast.apply(record_function, [CPU] * count, *tensors)
    assert len(flat) == count * len(tensors)
    return [flat[number * len(tensors) : (number + 1) * len(tensors)] for number in range(count)]


def test_the_first_device_has_the_tensors_themselves() -> None:
    """The first replica has the module's own tensors.

    Claim (dataparallel/README.md): hooks run once per replica; the first replica has the module's own tensors.
    """
    tensors = [torch.ones(2, requires_grad=True), torch.ones(3)]
    first, second = broadcast(tensors, 2)
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
        for device, own in enumerate(broadcast(tensors, devices))
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

    Claim (dataparallel/README.md): on GPUs, gradients are sent on the streams of the forward pass, and each device
    keeps its thread.
    """
    log: list[str] = []
    stage = "forward"

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append("off")

    def sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        log.append(f"sent to {device}")
        return [tensor.clone() for tensor in tensors]

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(f"{device}'s of {stage}"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr("dataparallel.broadcast.send", sent)
    devices = [torch.device("cuda", number) for number in range(3)]
    weight = torch.ones(2, requires_grad=True)
    copies = Broadcast.apply(record_function, devices, weight)
    assert log == ["sent to cuda:1", "sent to cuda:2"]
    log.clear()
    stage = "autograd"
    sum((number + 1) * copy.sum() for number, copy in enumerate(copies)).backward()
    assert weight.grad is not None and weight.grad.tolist() == [6, 6]
    assert log == [
        line
        for number in (1, 2)
        for line in (
            f"on cuda:{number}'s of forward",
            f"cuda:{number}'s of forward waits for cuda:0's of autograd",
            "sent to cuda:0",
            "off",
        )
    ]
