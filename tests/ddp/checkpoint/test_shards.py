"""Sharded checkpoints: any strategy and any number of ranks reads what any other has written."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from common.distributed.process_group import process_group
from ddp.checkpoint import folder, load, storage
from ddp.checkpoint.folder import Damaged
from ddp.checkpoint.sharded_state import load_sharded, save_sharded
from ddp.checkpoint.shards import (
    Region,
    Shard,
    assemble,
    in_memory_order,
    memory_order,
    open_shards,
    read,
    shard_content,
)
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

    Of another model, whose buffers are no parameters, and whose parameters lie in another order in memory.

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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint that two ranks have written."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_each, 2, folder, list(SHARDED))
    return folder / "zero3-2"


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """The path of that checkpoint, to be damaged."""
    shutil.copytree(saved, tmp_path / "run")
    return newest(tmp_path / "run").path


@pytest.mark.parametrize("strategy", SHARDED)
def test_the_files_of_a_sharded_checkpoint(saved: Path, strategy: str) -> None:
    """Each rank has a file, with its half of the model and optimizer."""
    path, manifest = newest(saved.with_name(f"{strategy}-2"))
    assert sorted(file.name for file in path.glob("*.pt")) == ["rank-0-of-2.pt", "rank-1-of-2.pt", "ranks.pt"]
    sizes = [(path / f"rank-{rank}-of-2.pt").stat().st_size for rank in range(2)]
    assert abs(sizes[0] - sizes[1]) < 0.05 * sizes[0]  # each its half
    assert manifest.step == STEPS and manifest.config["model"] == TINY["model"]


def test_a_damaged_part_names_its_rank(copy: Path) -> None:
    """A damaged part of a sharded checkpoint is reported with its rank.

    Claim (ddp/sharded/README.md, 9): a part that is missing, damaged or forged is named; no rank reads more than its
    part.
    """
    part = copy / "rank-1-of-2.pt"
    part.write_bytes(part.read_bytes()[:-100])  # other damage: test_damage.py
    with pytest.raises(Damaged, match=r"rank-1-of-2\.pt "):
        storage.verify(copy)


def test_a_file_that_is_not_listed_is_not_read(copy: Path) -> None:
    expected = storage.read(copy, "model")
    for stray in ("rank-0-of-1.pt", "rank-9-of-9.pt", "model.pt"):
        folder.write_entry(copy, stray.removesuffix(".pt"), {})
    found = storage.read(copy, "model")
    assert found.keys() == expected.keys()


def test_no_rank_reads_more_than_its_part(tmp_path: Path) -> None:
    """A rank takes only its part of the files into memory.

    Files are mapped: what is not taken does not come into memory.

    Claim (ddp/sharded/README.md, 9): a part that is missing, damaged or forged is named; no rank reads more than its
    part.
    """
    whole = {"model:w": Shard.of_whole(torch.ones(4000, 4000))}  # 64 MB
    path = tmp_path / "step-00000001"
    path.mkdir()
    written = folder.write_entry(path, "rank-0-of-1", shard_content(whole, ["w"], {}))
    folder.complete(path, 1, {}, {"rank-0-of-1": written})
    before = anonymous_bytes()
    shards = open_shards(path).shards["model:w"]
    assert read("w", shards, 1000, Region(8_000_000, (4000, 4000), (0, 1))).sum() == 1000
    assert anonymous_bytes() - before < 8e6


def anonymous_bytes() -> int:
    """Of this process, without what it has mapped from files."""
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
        Shard(flat[begin:end], Region(begin, tuple(shape), order)) for begin, end in itertools.pairwise(ends)
    ] or [Shard(flat, Region(0, tuple(shape), order))]
    assert torch.equal(assemble("w", shards), laid_out)
    other = tuple(data.draw(st.permutations(range(len(shape)))))
    begin = data.draw(st.integers(0, numel))
    length = data.draw(st.integers(0, numel - begin))
    found = read("w", shards, length, Region(begin, tuple(shape), other))
    assert torch.equal(found, in_memory_order(laid_out, other)[begin : begin + length])


@pytest.mark.parametrize(
    ("shards", "problem"),
    [
        ([], "nowhere"),
        ([(2, 0)], "in shards of 2 elements instead of 4"),
        ([(2, 0), (2, 1)], "a gap or an overlap at element 1"),
        ([(1, 0), (2, 2)], "a gap or an overlap at element 1"),
    ],
)
def test_shards_that_are_missing_or_overlap_are_named(shards: list[tuple[int, int]], problem: str) -> None:
    region = Region(0, (2, 2), (0, 1))
    made = [Shard(torch.ones(numel), region._replace(begin=begin)) for numel, begin in shards]
    with pytest.raises(LookupError, match=f"has w .*{problem}"):
        read("w", made, 4, region)


def test_shards_of_other_tensors_are_named() -> None:
    """Another shape, dtype or name."""
    region = Region(0, (4,), (0,))
    for other, problem in (
        (Shard(torch.ones(4), region._replace(shape=(2, 2), order=(0, 1))), r"of shape \[2, 2\] instead of \[4\]"),
        (Shard(torch.ones(2), region), "of 2 elements instead of 4"),
    ):
        with pytest.raises(LookupError, match=problem):
            read("w", [other], 4, region)
    mixed = [Shard(torch.ones(2), region), Shard(torch.ones(2).double(), region._replace(begin=2))]
    with pytest.raises(LookupError, match="of different tensors"):
        read("w", mixed, 4, region)


def test_an_expanded_tensor_does_not_seem_larger_than_its_file(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    path.mkdir()
    large = Shard(torch.ones(1).expand(10**12), Region(0, (10**12,), (0,)))
    written = folder.write_entry(path, "rank-0-of-1", shard_content({"model:w": large}, ["w"], {}))
    folder.complete(path, 1, {}, {"rank-0-of-1": written})
    with pytest.raises(Damaged, match="holds something else than shards"):
        open_shards(path)


def test_memory_order_of_channels_last() -> None:
    assert memory_order(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)) == (0, 2, 3, 1)


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
            with models[0].gathered() as one, models[1].gathered() as other:
                states = [model.state_dict() for model in (one, other)]
                answers.append(all(torch.equal(states[1][name], value) for name, value in states[0].items()))
            again = save_sharded(place / f"by-{read}", 7, models[1], optimizers[1])
            momentum = [storage.read(path, "optimizer")["state"] for path in (checkpoint.path, again)]
            answers.append(
                all(
                    torch.equal(momentum[1][n]["momentum_buffer"], v["momentum_buffer"]) for n, v in momentum[0].items()
                )
            )
            answers.append(optimizers[1].param_groups[0]["lr"] == 0.1 * written)
        for unlike in (torch.optim.Adagrad, functools.partial(torch.optim.Adam, amsgrad=True)):
            with pytest.raises(TypeError, match="cannot be saved in shards: use SGD, Adam or AdamW without amsgrad"):
                save_sharded(place, 8, models[0], unlike(models[0].parameters()))
        assert load_sharded(place / "nothing", models[0], optimizers[0]) is None
    return answers


def test_any_loop_saves_shards_and_any_stage_continues(tmp_path: Path) -> None:
    """A sharded model that is saved without the trainer is continued at every stage with the same weights, momentum and rate.

    Claim (README.md): a loop over shards of one's own continues from its checkpoints, on any number of ranks.
    """
    assert run_ranks(continued_by_every_stage, 2, tmp_path) == [[True] * 9] * 2
