"""ddp/by_hand/join.py: ranks that run out of inputs at different times train on as with torch's ``DDP.join``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ddp.by_hand import JoinableDistributedDataParallel
from ddp.conformance.expectations import expect_same
from ddp.conformance.networks import layers
from ddp.conformance.recorder import Recorder
from ddp.conformance.steps import EACH_ALONE, alone, average, backward, gradients
from tests.ddp.by_hand.programs import Program, Uneven, cases, compare
from tests.support.on_ranks import as_tests
from tests.support.ranks import run_in_group
from tests.support.zoo.named import UNUSED


def compared(programs: list[Program]) -> list[str]:
    tolerance = 0 if dist.get_world_size() == 2 else 1e-9
    results = (compare(program, tolerance, JoinableDistributedDataParallel) for program in programs)
    return [found for found in results if found]


@st.composite
def uneven(draw: st.DrawFn, model: str, world_size: int) -> Program:
    case = draw(cases(model, [None, None, "allreduce"]))
    case = replace(case, static_graph=False, find_unused=case.find_unused or model in UNUSED, dtype=torch.float64)
    # Whole optimizer steps: a rank that ends within one leaves the others unsure whether they are to synchronize.
    steps = tuple(draw(st.integers(0, 3)) for _ in range(world_size))
    block = Uneven(steps, draw(st.sampled_from([1, 2])), draw(st.booleans()), draw(st.booleans()))
    return Program(case, uneven=block)


def all_uneven(world_size: int) -> st.SearchStrategy[list[Program]]:
    models = ("images", "tied", "scalars", "branches", "frozen")
    return st.tuples(*[uneven(model, world_size) for model in models]).map(list)


@pytest.mark.parametrize("world_size", [2, 3])
@settings(max_examples=2, phases=[Phase.generate])
@given(data=st.data())
def test_ranks_of_uneven_inputs_train_as_torch_does(world_size: int, data: st.DataObject) -> None:
    """With two ranks, to the same bits.

    Claim (ddp/by_hand/README.md): uneven inputs are joined as by torch's `Join`.
    """
    for failed in run_in_group(compared, world_size, data.draw(all_uneven(world_size))):
        assert failed == []


def a_static_graph_overlaps_on_a_rank_that_had_no_batch_at_first() -> None:
    network = layers(3, 64, 64, 2)
    model = JoinableDistributedDataParallel(network, static_graph=True, bucket_cap_mb=EACH_ALONE)
    with model.join():
        for number in range(dist.get_rank() * 2):
            backward(model, number)
            model.zero_grad()
    backward(model)
    model.zero_grad()
    expected = average(alone(network))
    with Recorder() as record:
        backward(model)
    expect_same(gradients(network), expected)
    products = [at for at, operator in enumerate(record.operators) if operator == "aten.mm"]
    assert sum(message.at < products[-1] for message in record.gradients) >= 2


failed, test_program = as_tests(
    [
        a_static_graph_overlaps_on_a_rank_that_had_no_batch_at_first,
    ]
)
