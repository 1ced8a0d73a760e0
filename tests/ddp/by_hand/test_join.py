"""ddp/by_hand/drop_in/join.py: ranks that run out of inputs at different times train on as with torch's ``DDP.join``."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddp.by_hand import DistributedDataParallel as DropIn
from tests.ddp.by_hand.wrappers import Case, Results, Wrapper, batch, first_difference, loss_of, wrap
from tests.support.ranks import run_in_group


@dataclass(frozen=True)
class Uneven:
    """How many micro-steps each rank has, and how they are trained.

    :param by_join: with ``Join([model])`` instead of ``model.join()``
    """

    case: Case
    inputs: tuple[int, ...]
    divide_by_initial_world_size: bool
    by_join: bool


def train(engine: type[Wrapper], uneven: Uneven) -> list[Results]:
    """Gradients after each micro-step, and all weights and buffers at the end."""
    case = uneven.case
    network = case.network(seed=dist.get_rank())
    model = wrap(engine, network, case)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    results: list[Results] = []
    if uneven.by_join:
        join = Join([model], divide_by_initial_world_size=uneven.divide_by_initial_world_size)
    else:
        join = model.join(uneven.divide_by_initial_world_size)

    def micro_step(number: int) -> None:
        loss_of(model(batch(number, torch.float64), number=number)).backward()
        # Zeros and None count alike: once a rank has joined, torch's DDP gives zeros for parameters that no rank uses.
        gradients = {name: p.grad if p.grad is not None else p * 0 for name, p in network.named_parameters()}
        results.append({name: gradient.detach().clone() for name, gradient in gradients.items()})

    with join:
        for number in range(uneven.inputs[dist.get_rank()]):
            if number % case.grad_accumulation_steps < case.grad_accumulation_steps - 1:
                with model.no_sync():
                    micro_step(number)
            else:
                micro_step(number)
                optimizer.step()
                optimizer.zero_grad(set_to_none=case.set_to_none)
    results.append({name: value.clone() for name, value in network.state_dict().items()})
    # And on as before, together again; the optimizers may differ by now.
    network.zero_grad()
    micro_step(100)
    results.append({**network.state_dict(), **dict(network.named_buffers())})
    return results


def compared(examples: list[Uneven]) -> list[str]:
    failures = []
    tolerance = 0 if dist.get_world_size() == 2 else 1e-9
    for uneven in examples:
        theirs, ours = train(DistributedDataParallel, uneven), train(DropIn, uneven)
        for step, (results, expected) in enumerate(zip(ours, theirs, strict=True)):
            if differs := first_difference([("", results)], [("", expected)], tolerance):
                failures.append(f"{uneven}: step {step} of rank {dist.get_rank()}{differs}")
    return failures


@st.composite
def uneven_inputs(draw: st.DrawFn, model: str, world_size: int) -> Uneven:
    grad_accumulation_steps = draw(st.sampled_from([1, 2]))
    case = Case(
        model,
        bucket_cap_mb=draw(st.sampled_from([0.0001, None])),
        as_view=draw(st.booleans()),
        find_unused=draw(st.booleans()) or model == "branches",
        broadcast_buffers=draw(st.booleans()),
        grad_accumulation_steps=grad_accumulation_steps,
        set_to_none=draw(st.booleans()),
        hook=draw(st.sampled_from([None, None, "allreduce"])),
        dtype=torch.float64,
    )
    # Whole optimizer steps: a rank that ends within one leaves the others unsure whether they are to synchronize.
    steps = [draw(st.integers(0, 3)) for _ in range(world_size)]
    return Uneven(case, tuple(grad_accumulation_steps * n for n in steps), draw(st.booleans()), draw(st.booleans()))


def all_uneven(world_size: int) -> st.SearchStrategy[list[Uneven]]:
    models = ("images", "tied", "scalars", "branches", "frozen")
    return st.tuples(*[uneven_inputs(model, world_size) for model in models]).map(list)


@pytest.mark.parametrize("world_size", [2, 3])
@settings(max_examples=2, phases=[Phase.generate])
@given(data=st.data())
def test_ranks_of_uneven_inputs_train_as_torch_does(world_size: int, data: st.DataObject) -> None:
    """With two ranks, to the same bits.

    Claim (ddp/README.md, 10): uneven inputs are joined as by torch's `Join`.
    """
    for failed in run_in_group(compared, world_size, data.draw(all_uneven(world_size))):
        assert failed == []
