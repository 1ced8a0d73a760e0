"""ddp/by_hand/buckets.py: tensors are divided into buckets as torch's DDP divides them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from ddp.by_hand.buckets import Bucket, assign_buckets

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
    """Buckets have the parameters and the order of torch's.

    Claim (ddp/by_hand/README.md): buckets are torch's, and travel while backward goes on.
    """
    buckets = assign_buckets(tensors, limits)
    places = positions(tensors, buckets)
    theirs, _ = _compute_bucket_assignment_by_size(tensors, limits)
    assert sorted(places) == sorted(theirs)  # torch's come sorted by their first tensor
    # Ours come in the order in which they became full; then those that are left over.
    ends: dict[bool, list[int]] = {True: [], False: []}
    for number, bucket in enumerate(buckets):
        earlier = sum(other[0].dtype == bucket[0].dtype for other in buckets[:number])
        full = sum(tensor.nbytes for tensor in bucket) >= limits[min(earlier, len(limits) - 1)]
        ends[full].append(places[number][-1])
    assert ends == {full: sorted(indices) for full, indices in ends.items()}
    assert len(ends[False]) <= len({tensor.dtype for tensor in tensors})


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
    in_place = [bucket.contains_grad(index) for index in range(len(parameters))]
    sizes = [parameter.numel() for parameter in parameters]
    assert in_place == [(as_view or not sizes[i]) and i % 3 != 2 for i in range(len(parameters))]

    bucket.buffer.fill_(7)  # the other ranks' part
    before = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
    bucket.set_grads(receivers)
    for index, (parameter, view) in enumerate(zip(parameters, bucket.views.values(), strict=True)):
        if index in receivers or in_place[index]:
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 7), check_stride=False)
            assert bucket.contains_grad(index) == (as_view or not view.numel())
        else:
            torch.testing.assert_close(parameter.grad, before[index])
