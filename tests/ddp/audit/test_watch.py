"""The events that the watch writes down."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from ddp.audit.watch.event_types import Collective
from tests.ddp.audit import scripts
from tests.ddp.audit.forked import watch

COLLECTIVES = (
    scripts.GROUP
    + """
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
dense, wide = torch.ones(4, 2), torch.ones(4, 4)[:, ::2]
both = torch.ones(ranks * 4, 2)
for name in ("single", "into_tensor"):
    if gather := getattr(dist, f"all_gather_{name}", None):
        gather(output_tensor=both, input_tensor=dense)
for name in ("single", "tensor"):
    if scatter := getattr(dist, f"reduce_scatter_{name}", None):
        scatter(dense, both)
dist.reduce_scatter(dense, [dense, dense])
dist.all_to_all_single(torch.empty(4, 4)[:, ::2], dense)
dist.scatter(wide, [dense, dense] if rank == 0 else None)
dist.all_reduce(tensor=torch.tensor(1.5))
dist.scatter_object_list([None], [1, 2] if rank == 0 else None)
dist.monitored_barrier()
dist.destroy_process_group()
"""
)
NEW = ("all_gather_single", "reduce_scatter_single")  # since torch 2.14


@pytest.mark.examples
def test_collectives_are_seen_by_their_old_and_new_names(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(COLLECTIVES)
    for rank in watch(tmp_path, [str(path)]).ranks:
        events = rank.all(Collective)
        assert [event.name for event in events] == [
            *(name for name in (NEW[0], "all_gather_into_tensor", NEW[1]) if hasattr(dist, name)),
            *("reduce_scatter_tensor", "reduce_scatter", "all_to_all_single", "scatter", "all_reduce"),
            *("scatter_object_list", "monitored_barrier"),
        ]
        by_name = {event.name: event for event in events}
        assert (by_name["all_reduce"].before, by_name["all_reduce"].after) == ([1.5], [3.0])
        assert [name for name, event in by_name.items() if event.gaps] == ["all_to_all_single", "scatter"]
