"""Sharded checkpoints: any strategy and any number of ranks reads what any other has written."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp.checkpoint import folder, storage
from ddp.checkpoint.folder import SHARDED_FORMAT, Damaged
from ddp.checkpoint.pieces import (
    Piece,
    Place,
    assemble,
    in_memory_order,
    memory_order,
    open_shards,
    read,
    shard_content,
    shard_key,
)
from ddp.strategies import SHARDED
from tests.ddp.checkpoint.sharded_jobs import STEPS, TINY, newest, resume_each, save_each
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
    run_ranks(save_each, 2, tmp_path, STRATEGIES)
    for saved, strategy in (("torch-2", "zero3"), ("zero3-2", "fsdp2"), ("fsdp2-2", "zero1"), ("zero2-2", "torch")):
        check(run_ranks(resume_each, 3, tmp_path, [saved], [strategy])[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (3, 6)])
def test_all_pairs_of_strategies(tmp_path: Path, expected: list[float], before: int, after: int) -> None:
    run_ranks(save_each, before, tmp_path, STRATEGIES, timeout_s=300)
    saved = [f"{strategy}-{before}" for strategy in STRATEGIES]
    found = run_ranks(resume_each, after, tmp_path, saved, STRATEGIES, timeout_s=600)[0]
    assert len(found) == 25
    check(found, expected)


@pytest.mark.slow
def test_batchnorm_channels_last_and_momentum_travel(tmp_path: Path) -> None:
    """Of another model, whose buffers are no parameters, and whose parameters lie in another order in memory."""
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
    _, manifest = newest(saved.with_name(f"{strategy}-2"))
    assert sorted(manifest.files) == ["rank-0-of-2.pt", "rank-1-of-2.pt", "ranks.pt"]
    sizes = [manifest.files[f"rank-{rank}-of-2.pt"] for rank in range(2)]
    assert abs(sizes[0] - sizes[1]) < 0.05 * sizes[0]  # each its half
    assert manifest.step == STEPS and manifest.model == TINY["model"]


@pytest.mark.parametrize("kind", ["missing", "cut", "other"])
def test_a_damaged_part_names_its_rank(copy: Path, kind: str) -> None:
    part = copy / "rank-1-of-2.pt"
    if kind == "missing":
        part.unlink()
    elif kind == "cut":
        part.write_bytes(part.read_bytes()[:-100])
    else:
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    with pytest.raises(Damaged, match=r"rank-1-of-2\.pt "):
        storage.verify(copy)


def forge(path: Path, changed: dict[str, Any], piece: dict[str, Any]) -> None:
    """Write other content for rank 1, with matching digests."""
    content = folder.load(path, "rank-1-of-2")
    name = max(content["pieces"], key=lambda name: len(content["pieces"][name]["values"]))
    content["pieces"][name] |= piece
    content |= changed
    found = folder.verify(path)
    entries = {
        key.removesuffix(".pt"): folder._size_and_digest(path / key) for key in found.files if key != "rank-1-of-2.pt"
    }
    for file in ("rank-1-of-2.pt", folder.MANIFEST, folder.DIGESTS):
        (path / file).unlink()
    entries["rank-1-of-2"] = folder.write_entry(path, "rank-1-of-2", content)
    folder.complete(path, found.step, found.facts, entries, SHARDED_FORMAT)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"begin": 1}, "a gap or an overlap at element"),
        ({"begin": -1}, "has no piece as"),
        ({"shape": [7, 7]}, "of different tensors|of shape"),
        ({"values": "text"}, "has no piece as"),
        ({"values": torch.zeros(3, dtype=torch.float64)}, "of different tensors"),
        ({"order": [5, 6]}, "has no piece as"),
        ({"shape": ["a", "b"]}, "has no piece as"),
        ({"begin": 0.5}, "has no piece as"),
    ],
)
def test_a_forged_part_is_damaged(copy: Path, changed: dict[str, Any], problem: str) -> None:
    forge(copy, {}, changed)
    storage.verify(copy)  # the digests match
    with pytest.raises(Damaged, match=problem):
        storage.read(copy, "model")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"parameters": 5}, "has parameters that are no list"),
        ({"tied": []}, "has tied that are no dict"),
        ({"pieces": ["a"]}, "has pieces that are no dict"),
        ({"stateless": {}}, "has stateless that are no list"),
        ({"parameters": [5]}, "has names that are no text"),
        ({"tied": {"other": "nowhere"}}, "lacks nowhere"),
        ({"more": 1}, "holds a dict instead of pieces"),
    ],
)
def test_a_part_with_other_fields_is_damaged(copy: Path, changed: dict[str, Any], problem: str) -> None:
    forge(copy, changed, {})
    with pytest.raises(Damaged, match=problem):
        storage.read(copy, "model")


def test_a_file_that_is_not_listed_is_not_read(copy: Path) -> None:
    expected = storage.read(copy, "model")
    for stray in ("rank-0-of-1.pt", "rank-9-of-9.pt", "model.pt"):
        folder.write_entry(copy, stray.removesuffix(".pt"), {})
    found = storage.read(copy, "model")
    assert found.keys() == expected.keys()


def lacking(copy: Path, beginning: str) -> None:
    """Forge both parts without the pieces whose names begin so."""
    found = folder.verify(copy)
    kept = {key: folder._size_and_digest(copy / f"{key}.pt") for key in ("ranks",)}
    for key in ("rank-0-of-2", "rank-1-of-2"):
        content = folder.load(copy, key)
        content["pieces"] = {name: piece for name, piece in content["pieces"].items() if not name.startswith(beginning)}
        (copy / f"{key}.pt").unlink()
        kept[key] = folder.write_entry(copy, key, content)
    for file in (folder.MANIFEST, folder.DIGESTS):
        (copy / file).unlink()
    folder.complete(copy, found.step, found.facts, kept, SHARDED_FORMAT)


@pytest.mark.parametrize("beginning", ["exp_avg:blocks.0", "step:head", "model:norm"])
def test_what_is_lacking_is_damaged(copy: Path, beginning: str) -> None:
    lacking(copy, beginning)
    run_dir = copy.parent.parent
    with pytest.raises(AssertionError, match=r"is damaged: (lacks|has model:norm.* nowhere)"):
        run_ranks(resume_each, 1, run_dir.parent, [run_dir.name], ["zero1"])


def test_a_checkpoint_that_lacks_a_rank_is_no_checkpoint(copy: Path) -> None:
    found = folder.verify(copy)
    facts = {**found.facts, "world_size": 3}
    entries = {key.removesuffix(".pt"): folder._size_and_digest(copy / key) for key in found.files}
    for file in (folder.MANIFEST, folder.DIGESTS):
        (copy / file).unlink()
    folder.complete(copy, found.step, facts, entries, SHARDED_FORMAT)
    with pytest.raises(Damaged, match="without"):
        storage.verify(copy)


def test_no_rank_reads_more_than_its_part(tmp_path: Path) -> None:
    """Files are mapped: what is not taken does not come into memory."""
    whole = {"model:w": Piece.of_whole(torch.ones(4000, 4000))}  # 64 MB
    path = tmp_path / "step-00000001"
    path.mkdir()
    key = shard_key(0, 1)
    written = folder.write_entry(path, key, shard_content(whole, ["w"], {}, []))
    folder.complete(path, 1, {}, {key: written}, SHARDED_FORMAT)
    before = anonymous_bytes()
    pieces = open_shards(path).pieces["model:w"]
    assert read("w", pieces, 1000, Place(8_000_000, (4000, 4000), (0, 1))).sum() == 1000
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
    pieces = [Piece(flat[begin:end], Place(begin, tuple(shape), order)) for begin, end in itertools.pairwise(ends)] or [
        Piece(flat, Place(0, tuple(shape), order))
    ]
    assert torch.equal(assemble("w", pieces), laid_out)
    other = tuple(data.draw(st.permutations(range(len(shape)))))
    begin = data.draw(st.integers(0, numel))
    length = data.draw(st.integers(0, numel - begin))
    found = read("w", pieces, length, Place(begin, tuple(shape), other))
    assert torch.equal(found, in_memory_order(laid_out, other)[begin : begin + length])


def test_a_piece_that_is_missing_is_named() -> None:
    pieces = [Piece(torch.ones(2), Place(0, (2, 2), (0, 1)))]
    with pytest.raises(LookupError, match="has w in pieces of 2 elements instead of 4"):
        assemble("w", pieces)
    with pytest.raises(LookupError, match="lacks w"):
        assemble("w", [])


def test_memory_order_of_channels_last() -> None:
    assert memory_order(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)) == (0, 2, 3, 1)


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("model", ["no dict"]),
        ("model", {"head.weight": "no tensor"}),
        ("optimizer", {"state": {99: {}}, "param_groups": []}),
        ("optimizer", {"state": {99: {"exp_avg": torch.ones(1)}}, "param_groups": []}),
        ("optimizer", {"state": "text", "param_groups": []}),
        ("optimizer", {"state": {}, "param_groups": []}),
    ],
)
def test_what_replicas_never_wrote_is_damaged(tmp_path: Path, key: str, content: Any) -> None:
    run_ranks(save_each, 1, tmp_path, ["torch"])
    path = newest(tmp_path / "torch-1").path
    found = folder.verify(path)
    entries = {name.removesuffix(".pt"): folder._size_and_digest(path / name) for name in found.files}
    for file in (f"{key}.pt", folder.MANIFEST, folder.DIGESTS):
        (path / file).unlink()
    entries[key] = folder.write_entry(path, key, content)
    folder.complete(path, found.step, found.facts, entries)
    with pytest.raises(AssertionError, match="is damaged: "):
        run_ranks(resume_each, 1, tmp_path, ["torch-1"], ["zero3"])


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
