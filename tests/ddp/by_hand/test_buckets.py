"""ddp/by_hand/buckets.py: tensors are divided into buckets as torch's DDP divides them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from ddp.by_hand.buckets import Bucket, assign_buckets
from ddp.conformance.recorder import Recorder

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
limits = st.lists(st.integers(0, 600), min_size=1, max_size=3)


@st.composite
def tensor_lists(draw: st.DrawFn, kinds: st.SearchStrategy[torch.dtype] = dtypes) -> list[Tensor]:
    sizes = draw(st.lists(st.tuples(shapes, kinds), min_size=1, max_size=30))
    return [torch.zeros(shape, dtype=dtype) for shape, dtype in sizes]


def positions(tensors: list[Tensor], buckets: list[list[Tensor]]) -> list[list[int]]:
    """The buckets as torch gives them: by index."""
    where = {id(tensor): index for index, tensor in enumerate(tensors)}
    return [[where[id(tensor)] for tensor in bucket] for bucket in buckets]


@given(tensor_lists(), limits)
def test_buckets_are_torchs(tensors: list[Tensor], limits: list[int]) -> None:
    ours = positions(tensors, assign_buckets(tensors, limits))
    theirs, _ = _compute_bucket_assignment_by_size(tensors, limits)
    # torch's come sorted by their first tensor, which is not when they are complete.
    assert sorted(ours) == sorted(theirs)


@given(tensor_lists(), limits)
def test_buckets_keep_the_order_and_are_full_before_the_next_begins(tensors: list[Tensor], limits: list[int]) -> None:
    buckets = assign_buckets(tensors, limits)
    places = positions(tensors, buckets)
    ends: dict[bool, list[int]] = {True: [], False: []}
    for dtype in {tensor.dtype for tensor in tensors}:
        # Those of one dtype are the tensors of that dtype, cut into pieces.
        mine = [number for number, bucket in enumerate(buckets) if bucket[0].dtype == dtype]
        expected = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        assert [index for number in mine for index in places[number]] == expected
        for number, limit in itertools.zip_longest(mine, limits[: len(mine)], fillvalue=limits[-1]):
            sizes = [tensor.nbytes for tensor in buckets[number]]
            assert sum(sizes[:-1]) < limit or len(sizes) == 1
            assert sum(sizes) >= limit or number == mine[-1]
    for number, bucket in enumerate(buckets):
        earlier = sum(other[0].dtype == bucket[0].dtype for other in buckets[:number])
        full = sum(tensor.nbytes for tensor in bucket) >= limits[min(earlier, len(limits) - 1)]
        ends[full].append(places[number][-1])
    # First those that are full, in the order in which they became so; then what is left over.
    assert ends == {full: sorted(indices) for full, indices in ends.items()}


def test_buckets_of_nothing() -> None:
    assert assign_buckets([], [1]) == []


PARAMETERS: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.zeros(()),
    "vector": lambda: torch.zeros(5),
    "empty": lambda: torch.zeros(2, 0, 3),
    "transposed": lambda: torch.zeros(3, 4).t(),
    "channels last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.zeros(3, 8)[:, ::2],
}


def bucket_of(parameters: list[nn.Parameter], as_view: bool) -> Bucket:
    buffer = torch.full((sum(parameter.numel() for parameter in parameters),), 99.0)
    return Bucket(dict(enumerate(parameters)), buffer, as_view)


def fill(bucket: Bucket, divisor: float) -> None:
    bucket.to_copy = set(bucket.parameters)
    bucket.fill(divisor)


several = st.lists(st.sampled_from(sorted(PARAMETERS)), min_size=1, max_size=6)


@given(several, st.booleans(), st.sampled_from([1.0, 2.0, 3.0]), st.sets(st.integers(0, 5)))
def test_gradients_come_into_the_bucket_and_out_again(
    names: list[str], as_view: bool, divisor: float, receivers: set[int]
) -> None:
    parameters = [nn.Parameter(PARAMETERS[name]()) for name in names]
    bucket = bucket_of(parameters, as_view)
    for name, parameter, view in zip(names, parameters, bucket.views.values(), strict=True):
        assert view.shape == parameter.shape
        assert view.untyped_storage().data_ptr() == bucket.buffer.untyped_storage().data_ptr()
        if name != "with gaps":
            assert view.stride() == parameter.stride()  # optimizers walk both together
    gradients = [torch.randn(parameter.shape) for parameter in parameters]
    for index, parameter in enumerate(parameters):
        parameter.grad = None if index % 3 == 2 else gradients[index].clone()

    fill(bucket, divisor)
    for index, (gradient, view) in enumerate(zip(gradients, bucket.views.values(), strict=True)):
        torch.testing.assert_close(
            view, torch.zeros_like(view) if index % 3 == 2 else gradient / divisor, check_stride=False
        )
    in_place = [bucket.holds(index) for index in range(len(parameters))]
    sizes = [parameter.numel() for parameter in parameters]
    assert in_place == [(as_view or not sizes[i]) and i % 3 != 2 for i in range(len(parameters))]

    bucket.buffer.fill_(7)  # the other ranks' part
    before = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
    bucket.finalize(receivers)
    for index, (parameter, view) in enumerate(zip(parameters, bucket.views.values(), strict=True)):
        if index in receivers or in_place[index]:
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 7), check_stride=False)
            assert bucket.holds(index) == (as_view or not view.numel())
        else:
            torch.testing.assert_close(parameter.grad, before[index])


def test_a_gradient_that_lives_in_its_bucket_is_divided_there() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    bucket = bucket_of([parameter], as_view=True)
    parameter.grad = torch.tensor([2.0, 4.0, 6.0])
    fill(bucket, 2)
    assert bucket.holds(0)
    parameter.grad += 1
    fill(bucket, 1)
    assert bucket.buffer.tolist() == [2, 3, 4]
    fill(bucket, 4)
    assert bucket.buffer.tolist() == [0.5, 0.75, 1]


def test_a_gradient_that_was_moved_is_copied_again_and_the_bucket_keeps_its_place() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    bucket = bucket_of([parameter], as_view=True)
    for step in range(2):
        parameter.grad = torch.tensor([2.0, 4.0, 6.0])
        fill(bucket, 2)
        parameter.grad.data = torch.tensor([7.0, 8.0, 9.0])  # of the object that the bucket has handed out
        assert not bucket.holds(0)
        fill(bucket, 1)
        assert bucket.holds(0)
        assert bucket.buffer.tolist() == [7, 8, 9], step
        parameter.grad = None


@pytest.mark.parametrize(("device", "together"), [("cpu", False), ("meta", True)])
def test_large_gradients_are_copied_one_by_one_on_a_cpu_and_in_one_call_elsewhere(device: str, together: bool) -> None:
    parameters = [nn.Parameter(torch.zeros(40_000, device=device)) for _ in range(2)]
    bucket = Bucket(dict(enumerate(parameters)), torch.zeros(80_000, device=device), as_view=True)
    assert bucket.together == together
    if device == "cpu":
        bucket.together = True
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with Recorder() as record:
            fill(bucket, 2)
        assert [name for name in record.operators if "copy" in name or "mul" in name] == [
            "aten._foreach_copy_",
            "aten.mul_",
        ]
        assert bucket.buffer.unique().tolist() == [0.5]
