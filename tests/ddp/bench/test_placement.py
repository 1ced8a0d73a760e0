"""``ddp.bench.placement``: which device a benchmark's ranks get, on machines with any number of GPUs."""

from __future__ import annotations

import re

import pytest

from ddp.bench.placement import Placement, place_ranks
from tests.support.fake_gpu import pretend_gpus


@pytest.mark.parametrize(
    ("gpus", "asked", "placement", "backend", "words"),
    [
        (0, ("auto", None, 1), Placement(2, 0), "gloo", r"2 ranks on \d+ cores?, gloo"),
        (1, ("auto", None, 1), Placement(1, 1), "nccl", "1 rank on 1 GPU, nccl"),
        (1, ("auto", None, 2), Placement(2, 0), "gloo", r"2 ranks on \d+ cores?, gloo"),  # one GPU has nothing to sum
        (1, ("cuda", 2, 1), Placement(2, 1), "gloo", "2 ranks that share 1 GPU, gloo"),
        (1, ("cpu", None, 1), Placement(2, 0), "gloo", r"2 ranks on \d+ cores?, gloo"),
        (8, ("auto", None, 1), Placement(8, 8), "nccl", "8 ranks on 8 GPUs, nccl"),
        (8, ("auto", 3, 2), Placement(3, 8), "nccl", "3 ranks on 3 GPUs, nccl"),
    ],
)
def test_each_rank_gets_a_gpu_or_all_a_place_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    asked: tuple[str, int | None, int],
    placement: Placement,
    backend: str,
    words: str,
) -> None:
    """Each rank of a benchmark gets a GPU, or all share the device that is named.

    Claim (ddp/README.md): on a GPU: a benchmark's ranks get a GPU each, over NCCL, or share one, over gloo; times are
    those of the GPU's streams.
    """
    pretend_gpus(monkeypatch, gpus)
    placed = place_ranks(*asked)
    assert (placed, placed.backend, placed.device) == (placement, backend, "cuda" if placement.gpus else "cpu")
    assert re.fullmatch(words, str(placed))
    assert place_ranks(placed.device, placed.ranks) == placed  # as a configuration has it
