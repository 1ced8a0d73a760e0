"""Sharded checkpoints: any strategy and any number of ranks reads what any other has written."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp.checkpoint import folder, load, storage
from ddp.checkpoint.folder import Damaged
from ddp.checkpoint.sharded_state import load_sharded, save_sharded
from ddp.checkpoint.shards import (
    Region,
    SavedShard,
    SavedTensors,
    in_memory_order,
    open_tensors,
    shard_content,
)
from ddp.rendezvous.process_group import process_group
from ddp.sharded import shard
from ddp.strategies import SHARDED
from tests.ddp.checkpoint.sharded_jobs import STEPS, TINY, resume_each, save_each
from tests.ddp.jobs import newest
from tests.support.launch import run_ranks

STRATEGIES = ["torch", *SHARDED]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses after the checkpoint, of one process that resumes its own."""
    folder = tmp_path_factory.mktemp("one-process")
    run_ranks(save_each, 1, folder, ["torch"])
    [resumed] = run_ranks(resume_each, 1, folder, ["torch-1"], ["torch"])
    assert resumed["torch-1", "torch"].differences == []
    losses: list[float] = resumed["torch-1", "torch"].losses
    return losses


def check(found: dict[Any, Any], expected: list[float]) -> None:
    for pair, (differences, losses) in found.items():
        assert differences == [], pair
        assert losses == pytest.approx(expected, abs=1e-4), pair


def test_a_checkpoint_is_resumed_by_another_strategy_at_another_world_size(
    tmp_path: Path, expected: list[float]
) -> None:
    """A checkpoint is resumed by another strategy at another world size.

    Claim (ddp/sharded/README.md, 9): a checkpoint is resumed by another strategy at another world size.
    """
    run_ranks(save_each, 2, tmp_path, STRATEGIES)
    for saved, strategy in (("torch-2", "zero3"), ("zero3-2", "fsdp2"), ("fsdp2-2", "zero1"), ("zero2-2", "torch")):
        check(run_ranks(resume_each, 3, tmp_path, [saved], [strategy])[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (3, 6)])
def test_all_pairs_of_strategies(tmp_path: Path, expected: list[float], before: int, after: int) -> None:
    """A checkpoint of each strategy is resumed by each strategy, at other world sizes.

    Claim (ddp/sharded/README.md, 9): a checkpoint is resumed in all pairs of strategies, with BatchNorm,
    channels-last and momentum.
    """
    run_ranks(save_each, before, tmp_path, STRATEGIES, timeout_s=300)
    saved = [f"{strategy}-{before}" for strategy in STRATEGIES]
    found = run_ranks(resume_each, after, tmp_path, saved, STRATEGIES, timeout_s=600)[0]
    assert len(found) == 25
    check(found, expected)


@pytest.mark.slow
def test_batchnorm_channels_last_and_momentum_travel(tmp_path: Path) -> None:
    """BatchNorm's buffers, channels-last parameters and momentum survive a change of strategy.

    It is another model: its buffers are no parameters, and its parameters lie in another order in memory.

    Claim (ddp/sharded/README.md, 9): a checkpoint is resumed in all pairs of strategies, with BatchNorm,
    channels-last and momentum.
    """
    settings: dict[str, Any] = {
        "model": "fashion-cnn",
        "width": None,
        "layers": None,
        "dataset": "glyphs",
        "optimizer": "sgd",
    }
    settings |= {"sync_batchnorm": True, "dropout": 0.0}  # else each rank has its own statistics and units
    run_ranks(save_each, 2, tmp_path, ["torch", "zero3"], settings)
    # The means of four equal statistics are exact.
    found = run_ranks(resume_each, 4, tmp_path, ["torch-2", "zero3-2"], ["zero2", "fsdp2"], settings)[0]
    contiguous = {**settings, "channels_last": False}
    found |= run_ranks(resume_each, 2, tmp_path, ["zero3-2"], ["zero3", "torch"], contiguous)[0]
    losses = [resumed.losses for resumed in found.values()]
    assert [resumed.differences for resumed in found.values()] == [[]] * len(found)
    assert losses == [pytest.approx(losses[0], abs=1e-3)] * len(losses)


def test_each_rank_has_a_file_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    """Each rank writes its half of the model and optimizer, and a damaged file is reported with its rank.

    Claim (ddp/sharded/README.md, 9): a part that is missing or damaged is named; no rank reads more than its part.
    """
    run_ranks(save_each, 2, tmp_path, list(SHARDED))
    for strategy in SHARDED:
        path, manifest = newest(tmp_path / f"{strategy}-2")
        assert sorted(file.name for file in path.glob("*.pt")) == ["rank-0-of-2.pt", "rank-1-of-2.pt", "ranks.pt"]
        sizes = [(path / f"rank-{rank}-of-2.pt").stat().st_size for rank in range(2)]
        assert abs(sizes[0] - sizes[1]) < 0.05 * sizes[0]
        assert manifest.step == STEPS and manifest.config["model"] == TINY["model"]
    part = path / "rank-1-of-2.pt"
    part.write_bytes(part.read_bytes()[:-100])  # other damage: test_damage.py
    with pytest.raises(Damaged, match=r"rank-1-of-2\.pt "):
        storage.verify(path)


def test_no_rank_reads_more_than_its_part(tmp_path: Path) -> None:
    """A rank takes only its part of the files into memory.

    Files are mapped: what is not taken does not come into memory.

    Claim (ddp/sharded/README.md, 9): a part that is missing or damaged is named; no rank reads more than its part.
    """
    whole = {"model:w": SavedShard.of_whole(torch.ones(4000, 4000))}  # 64 MB
    folder.write_entry(tmp_path, "rank-0-of-1", shard_content(whole, ["w"], {}))
    before = anonymous_bytes()
    part = open_tensors(tmp_path, ["w"]).read("model:w", 1000, Region(8_000_000, (4000, 4000), (0, 1)))
    assert part.sum() == 1000
    assert anonymous_bytes() - before < 8e6


def anonymous_bytes() -> int:
    """Bytes of this process, without those that it has mapped from files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=4),
    cuts=st.lists(st.integers(0, 700), max_size=4),
    data=st.data(),
)
def test_any_cut_is_read_as_any_other(shape: list[int], cuts: list[int], data: st.DataObject) -> None:
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    laid_out = torch.randn([shape[dim] for dim in order]).permute(sorted(range(len(order)), key=order.__getitem__))
    flat, numel = in_memory_order(laid_out, order), laid_out.numel()
    ends = sorted({min(cut, numel) for cut in cuts} | {0, numel})
    shards = [
        SavedShard(flat[begin:end], Region(begin, tuple(shape), order)) for begin, end in itertools.pairwise(ends)
    ] or [SavedShard(flat, Region(0, tuple(shape), order))]
    saved = SavedTensors(Path("saved"), {"w": data.draw(st.permutations(shards))})
    assert torch.equal(saved.whole("w"), laid_out)
    other = tuple(data.draw(st.permutations(range(len(shape)))))
    begin = data.draw(st.integers(0, numel))
    length = data.draw(st.integers(0, numel - begin))
    found = saved.read("w", length, Region(begin, tuple(shape), other))
    assert torch.equal(found, in_memory_order(laid_out, other)[begin : begin + length])


ROW = Region(0, (4,), (0,))
TWO = torch.ones(2)


@pytest.mark.parametrize(
    ("shards", "problem"),
    [
        ([], "nowhere"),
        ([SavedShard(TWO, ROW)], "in shards of 2 elements"),
        ([SavedShard(TWO, ROW), SavedShard(TWO, ROW._replace(begin=1))], "that do not fit together at element 2"),
        ([SavedShard(TWO[:1], ROW), SavedShard(TWO, ROW._replace(begin=2))], "that do not fit together at element 1"),
        (
            [SavedShard(TWO, ROW), SavedShard(TWO.double(), ROW._replace(begin=2))],
            "that do not fit together at element 2",
        ),
        ([SavedShard(torch.ones(4), Region(0, (2, 2), (0, 1)))], r"of shape \[2, 2\] instead of \[4\]"),
    ],
)
def test_shards_that_are_missing_overlap_or_are_of_other_tensors_are_named(
    shards: list[SavedShard], problem: str
) -> None:
    with pytest.raises(Damaged, match=f"has w .*{problem}"):
        SavedTensors(Path("saved"), {"w": shards}).read("w", 4, ROW)


class Twice(torch.nn.Module):
    """A BatchNorm that is used twice, and parameters that never get a gradient."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(3, 3)
        self.first = torch.nn.Linear(784, 32)
        self.norm1 = self.norm2 = torch.nn.BatchNorm1d(32)
        self.last = torch.nn.Linear(32, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.norm2(self.norm1(self.first(images.view(images.size(0), -1))))
        logits: torch.Tensor = self.last(x)
        return logits


def build_twice(shape: tuple[int, int, int], classes: int) -> torch.nn.Module:
    return Twice(classes)


def test_modules_that_are_used_twice_or_never(tmp_path: Path) -> None:
    settings = {
        "model": "tests.ddp.checkpoint.test_shards:build_twice",
        "width": None,
        "layers": None,
        "dataset": "glyphs",
        "channels_last": False,
    }
    run_ranks(save_each, 2, tmp_path, ["zero1"], settings)
    found = run_ranks(resume_each, 2, tmp_path, ["zero1-2"], ["zero3", "zero2"], settings)[0]
    assert [resumed.differences for resumed in found.values()] == [[], []]
    weights = storage.read(newest(tmp_path / "zero1-2").path, "model")
    Twice(10).load_state_dict(weights)


def state_in(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    saved = open_tensors(path, ())
    return {name: saved.whole(name) for name in saved.shards}


def continued_by_every_stage(place: Path) -> list[bool]:
    """Whether a model of each stage continues from one of each stage with the same weights, momentum and rate."""
    answers = []
    with process_group("cpu", threads=1):
        for written, read in ((1, 3), (2, 1), (3, 2)):
            models, optimizers = [], []
            for stage in (written, read):
                model = shard(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)), stage=stage)
                models.append(model)
                optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1 * stage, momentum=0.9))
            models[0](torch.arange(16.0).view(4, 4)).sum().backward()
            optimizers[0].step()
            directory = place / f"from-{written}"
            save_sharded(directory, 7, models[0], optimizers[0], note={"any": 1})
            checkpoint = load_sharded(directory, models[1], optimizers[1])
            assert checkpoint is not None and (checkpoint.step, load(checkpoint.path, "note")) == (7, {"any": 1})
            again = state_in(save_sharded(place / f"by-{read}", 7, models[1], optimizers[1]))
            before = state_in(checkpoint.path)
            assert again.keys() == before.keys()
            answers.append(all(torch.equal(again[name], value) for name, value in before.items()))
            answers.append(optimizers[1].param_groups[0]["lr"] == 0.1 * written)
        with pytest.raises(TypeError, match="cannot be saved in shards: use SGD, Adam or AdamW without amsgrad"):
            save_sharded(place, 8, models[0], torch.optim.Adam(models[0].parameters(), amsgrad=True))
        assert load_sharded(place / "nothing", models[0], optimizers[0]) is None
    return answers


def test_any_loop_saves_shards_and_any_stage_continues(tmp_path: Path) -> None:
    """A sharded model that is saved without the trainer is continued at every stage with the same weights, momentum and rate.

    Claim (README.md): a loop over shards of one's own continues from its checkpoints, on any number of ranks.
    """
    assert run_ranks(continued_by_every_stage, 2, tmp_path) == [[True] * 6] * 2
