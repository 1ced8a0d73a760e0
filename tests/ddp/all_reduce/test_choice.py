"""ddp/all_reduce/choice.py: every name is an all-reduce of its own, for the ranks of any group."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist

from ddp.all_reduce import ALL_REDUCES
from ddp.all_reduce.choice import build_all_reduce
from ddp.rendezvous.process_group import process_group
from tests.support.launch import run_ranks


def built() -> list[str]:
    with process_group(timeout_s=250) as env:
        group = cast(dist.ProcessGroup, dist.new_group([0, 2]))
        kinds = []
        for name in ALL_REDUCES:
            for ranks, members in (([0, 1, 2], None), ([0, 2], group)):
                if env.rank in ranks:
                    all_reduce = build_all_reduce(name, members)
                    values = torch.arange(1000.0)
                    all_reduce.run(values)
                    assert torch.equal(values, len(ranks) * torch.arange(1000.0))
                    all_reduce.close()
            kinds.append(type(all_reduce).__name__)
        return kinds


def test_every_name_is_an_all_reduce_of_its_own() -> None:
    """Every name is an all-reduce of its own.

    Claim (ddp/all_reduce/README.md): each name of `--all-reduce` is an algorithm of its own.
    """
    for kinds in run_ranks(built, 3):
        assert [kind.lower() for kind in kinds] == [name.replace("-", "") for name in ALL_REDUCES]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no all-reduce is called 'star': choose from backend, naive, ring"):
        build_all_reduce("star")
