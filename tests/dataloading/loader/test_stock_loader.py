"""The workers of torch's ``DataLoader``, as dataloading/README.md explains them."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Event
from typing import Any

import pytest
from torch.utils.data import Dataset, get_worker_info

from dataloading.loader.stock_loader import stock_loader


class LateFile(Dataset[Any]):
    """Eight samples, each with its worker. Number 0 waits for an event, which number 7 may set.

    :param set_by_last: whether number 7 sets it
    """

    def __init__(self, event: Event, set_by_last: bool) -> None:
        self._event, self._set_by_last = event, set_by_last

    def __getitem__(self, number: int) -> tuple[int, int]:
        if number == 0:
            assert self._event.wait(60)
        if number == 7 and self._set_by_last:
            self._event.set()
        worker = get_worker_info()
        assert worker is not None
        return number, worker.id


@pytest.mark.parametrize("in_order", [True, False])
def test_a_worker_makes_whole_batches_and_a_late_one_holds_up_the_others_only_in_order(in_order: bool) -> None:
    """A batch is the work of one worker. A late batch holds up the others only if they must come in order.

    Claim (dataloading/README.md, 2): a worker makes whole batches; a late file holds up the others only in order.
    """
    event = multiprocessing.Event()
    dataset = LateFile(event, set_by_last=in_order)
    batches = []
    for batch in stock_loader(dataset, 2, batch_size=4, sampler=range(8), collate_fn=list, in_order=in_order):
        batches.append(batch)
        event.set()
    first, second = [[(number, 0) for number in range(4)], [(number, 1) for number in range(4, 8)]]
    assert batches == ([first, second] if in_order else [second, first])
