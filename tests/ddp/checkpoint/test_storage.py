"""ddp/checkpoint/storage.py: complete or absent, every byte checked, nothing executed, and never the last one lost."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.distributed.process_group import stop_signals
from common.errors import UsageError
from ddp.checkpoint import manifest as checkpoint_manifest
from ddp.checkpoint import storage
from ddp.checkpoint.manifest import KINDS, Damaged, Manifest
from ddp.checkpoint.storage import FOLDER

FILES = ("model.pt", "optimizer.pt", "ranks.pt", "manifest.json")
OLDER, NEWER = "epoch-0001-step-00000010", "epoch-0002-step-00000020"


def manifest(step: int) -> Manifest:
    return Manifest(
        step=step, epoch=step // 10, position=step % 10, seed=0, world_size=2, batch_size=144, grad_accumulation_steps=1,
        dataset="glyphs", dataset_length=432, dataset_fingerprint="abc", model="mlp", optimizer="sgd",
        config={"lr": 0.1, "data_dir": None}, progress={"accuracy": 0.1 + step / 100, "best": None},
        versions={"torch": torch.__version__},
    )  # fmt: skip


def contents(step: int) -> dict[str, Any]:
    """A few hundred bytes of tensors, other ones for every step."""
    return {
        "model": {"w": torch.full((30,), step + 1 / 3), "bn.num_batches_tracked": torch.tensor(step)},
        "optimizer": {"state": {0: {"momentum_buffer": torch.full((30,), -step - 0.1)}}, "param_groups": [{"lr": 0.1}]},
        "ranks": [{"rng": torch.arange(16, dtype=torch.uint8) + step + rank} for rank in range(2)],
    }


def write(run_dir: Path, step: int) -> Path:
    return storage.write(run_dir, manifest(step), contents(step))


def bits(value: Any) -> Any:
    """``value`` with tensors as (dtype, shape, bytes), so that == compares bit for bit, and nan equals nan."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else value


def assert_is(path: Path, step: int) -> None:
    """That ``path`` holds what :func:`write` wrote at ``step``."""
    found = storage.verify(path)
    assert dataclasses.replace(found, files={}) == manifest(step)
    assert bits({kind: storage.read(path, kind) for kind in KINDS}) == bits(contents(step))


def litter(run_dir: Path) -> list[str]:
    return [name for name in os.listdir(run_dir / FOLDER) if name.startswith(".")]


# What is written comes back


def test_what_was_written_is_read(tmp_path: Path) -> None:
    odd = {
        "nan": struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000))[0], "inf": -math.inf, "third": 1 / 3,
        "least": 5e-324, "zero": -0.0, "large": 2**70, "text": "läuft\n\ud800", "none": None, "nested": {"b": 1, "a": [True]},
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    model = {
        "bf16": torch.randn(7, 5, generator=generator).bfloat16(),
        "0-d": torch.tensor(math.pi, dtype=torch.float64),
        "int64": torch.tensor([2**63 - 1, -(2**63)]),
        "empty": torch.empty(0, 3),
        "nan": torch.tensor([math.nan, -math.nan, math.inf, -0.0]),
        "bool": torch.tensor([True, False]),
        "transposed": torch.randn(4, 3, generator=generator).t(),
        "channels_last": torch.randn(2, 3, 4, 4, generator=generator).contiguous(memory_format=torch.channels_last),
        "large": torch.randn(1 << 18, generator=generator),
    }
    whole = {"model": model, "optimizer": {"state": {}}, "ranks": [{"rng": torch.get_rng_state()}, None]}
    before = dataclasses.replace(manifest(123), progress=odd)
    path = storage.write(tmp_path, before, whole)

    assert path == tmp_path / FOLDER / "epoch-0012-step-00000123"
    assert sorted(os.listdir(path)) == sorted(FILES)
    found = storage.newest(tmp_path)
    assert found is not None and found[0] == path
    after = dataclasses.asdict(found[1])
    assert bits(after.pop("files")) == bits(
        {
            f"{kind}.pt": {
                "bytes": (path / f"{kind}.pt").stat().st_size,
                "sha256": hashlib.sha256((path / f"{kind}.pt").read_bytes()).hexdigest(),
            }
            for kind in KINDS
        }
    )
    assert bits(after) == bits({k: v for k, v in dataclasses.asdict(before).items() if k != "files"})
    assert list(after["progress"]) == list(odd)  # also the order
    assert bits({kind: storage.read(path, kind) for kind in KINDS}) == bits(whole)
    assert storage.read(path, "model")["channels_last"].is_contiguous(memory_format=torch.channels_last)


def test_an_optimizer_goes_on_from_what_was_read(tmp_path: Path) -> None:
    network = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(network.parameters(), amsgrad=True)
    network(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = storage.write(
        tmp_path, manifest(1), {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "ranks": []}
    )
    other = torch.optim.Adam(network.parameters(), amsgrad=True)
    other.load_state_dict(storage.read(path, "optimizer"))
    assert bits(other.state_dict()) == bits(optimizer.state_dict())


def test_the_encoded_model_is_not_held_in_memory(tmp_path: Path) -> None:
    """A second process' peak memory, which no other test has raised."""
    size = 128 << 20
    growth = _in_a_process(_written_in, tmp_path, size)
    assert growth < size / 4


def _written_in(run_dir: Path, size: int) -> int:
    """Bytes by which the peak of this process' memory has grown over writing a model of ``size`` bytes."""
    model = {"w": torch.ones(size // 4)}

    def peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))

    before = peak()
    storage.write(run_dir, manifest(1), {"model": model, "optimizer": {}, "ranks": []})
    return peak() - before


def test_names_sort_in_time(tmp_path: Path) -> None:
    steps = [5, 100_000_000, 70, 99_999_999, 123]  # the last with more digits than the others have
    for step in steps:
        write(tmp_path, step)
    for other in ("damaged-" + OLDER, ".saving-1", "notes.txt", OLDER + "~"):
        (tmp_path / FOLDER / other).mkdir()
    paths = storage.all_of(tmp_path)
    assert [storage.verify(path).step for path in paths] == sorted(steps)
    assert paths[0].name == "epoch-0000-step-00000005"


def test_of_nothing_there_is_no_newest(tmp_path: Path) -> None:
    assert storage.newest(tmp_path) is None
    assert storage.newest(tmp_path / "elsewhere") is None
    (tmp_path / FOLDER).mkdir()
    assert storage.newest(tmp_path) is None
    storage.clean(tmp_path / "elsewhere")


# Which are kept


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        write(tmp_path, step)
    (tmp_path / FOLDER / ("damaged-" + OLDER)).mkdir()
    storage.prune(tmp_path, 2, best=NEWER)
    assert [path.name[-2:] for path in storage.all_of(tmp_path)] == ["20", "40", "50"]
    storage.prune(tmp_path, 2, best=None)
    storage.prune(tmp_path, 2, best=None)
    assert [path.name[-2:] for path in storage.all_of(tmp_path)] == ["40", "50"]
    assert len(os.listdir(tmp_path / FOLDER)) == 3  # the damaged one is left
    assert_is(tmp_path / FOLDER / "epoch-0005-step-00000050", 50)


@pytest.mark.parametrize("before", ["a damaged one", "a whole one", "a file", "a link to nothing"])
def test_one_of_the_same_name_is_replaced(tmp_path: Path, before: str) -> None:
    path = write(tmp_path, 20)
    if before == "a damaged one":
        (path / "model.pt").write_bytes(b"")
    elif before != "a whole one":
        shutil.rmtree(path)
        path.touch() if before == "a file" else path.symlink_to("nowhere")
    write(tmp_path, 20)
    assert_is(path, 20)
    assert os.listdir(tmp_path / FOLDER) == [NEWER]


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    for step in (10, 20):
        write(tmp_path, step)
    os.rename(folder / NEWER, folder / f".replaced-{NEWER}-0123")  # killed between the two renames of a replacement
    shutil.copytree(folder / OLDER, folder / f".replaced-{OLDER}-4567")  # killed after them
    for name in (".saving-1", ".removed-1"):
        (folder / name).mkdir()
        (folder / name / "model.pt").touch()
    (folder / f".replaced-{OLDER}-89ab").touch()  # a file was in the checkpoint's place
    storage.clean(tmp_path)
    assert sorted(os.listdir(folder)) == [OLDER, NEWER]
    assert_is(folder / NEWER, 20)


# A thousand damaged ones


@dataclasses.dataclass
class Pair:
    """A run with two checkpoints, and the bytes of both; the newer is what gets damaged."""

    run_dir: Path
    older: dict[str, bytes]
    newer: dict[str, bytes]

    def restored(self) -> Path:
        """The newer checkpoint as it was written."""
        path = self.run_dir / FOLDER / NEWER
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink()
        path.mkdir()
        for name, content in self.newer.items():
            (path / name).write_bytes(content)
        return path


def bytes_of(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    run_dir = tmp_path_factory.mktemp("pair")
    return Pair(run_dir, bytes_of(write(run_dir, 10)), bytes_of(write(run_dir, 20)))


Damage = Callable[[Path, Pair], None]
OFFSETS = st.integers(0, 1 << 20)  # taken modulo a file's length
ONE_FILE = st.sampled_from(FILES)


def truncated(file: str, offset: int) -> Damage:
    def damage(path: Path, pair: Pair) -> None:
        (path / file).write_bytes(pair.newer[file][: offset % len(pair.newer[file])])

    return damage


def flipped(flips: list[tuple[str, int, int]]) -> Damage:
    def damage(path: Path, pair: Pair) -> None:
        for file, offset, bit in flips:
            content = bytearray((path / file).read_bytes())
            content[offset % len(content)] ^= 1 << bit
            (path / file).write_bytes(content)

    return damage


def appended(file: str, tail: bytes) -> Damage:
    def damage(path: Path, pair: Pair) -> None:
        (path / file).write_bytes(pair.newer[file] + tail)

    return damage


def exchanged(first: str, second: str) -> Damage:
    def damage(path: Path, pair: Pair) -> None:
        (path / first).write_bytes(pair.newer[second])
        (path / second).write_bytes(pair.newer[first])

    return damage


def of_the_other(files: set[str]) -> Damage:
    """Files, the manifest perhaps among them, of the checkpoint before."""

    def damage(path: Path, pair: Pair) -> None:
        for file in files:
            (path / file).write_bytes(pair.older[file])

    return damage


def missing(files: set[str]) -> Damage:
    def damage(path: Path, pair: Pair) -> None:
        for file in files:
            (path / file).unlink()

    return damage


def replaced(kind: str, file: str | None) -> Damage:
    """A file, or the whole folder, by something else: a folder where a file was, or the other way round."""

    def damage(path: Path, pair: Pair) -> None:
        target = path if file is None else path / file
        shutil.rmtree(target) if file is None else target.unlink()
        if kind == "file":
            target.write_bytes(b"" if file else pair.newer["model.pt"])
        elif kind == "folder":
            target.mkdir()
        elif kind == "pipe":
            os.mkfifo(target)  # opened, it would wait for somebody to write
        else:
            target.symlink_to("nowhere" if kind == "dangling link" else target.name)  # or to itself

    return damage


DAMAGES = st.one_of(
    st.builds(truncated, ONE_FILE, OFFSETS),
    st.builds(flipped, st.lists(st.tuples(ONE_FILE, OFFSETS, st.integers(0, 7)), min_size=1, max_size=8)),
    st.builds(appended, ONE_FILE, st.binary(min_size=1, max_size=64)),
    st.builds(exchanged, ONE_FILE, ONE_FILE),
    st.builds(of_the_other, st.sets(ONE_FILE, min_size=1)),
    st.builds(missing, st.sets(ONE_FILE, min_size=1)),
    st.builds(
        replaced, st.sampled_from(["file", "folder", "pipe", "dangling link", "circular link"]), st.none() | ONE_FILE
    ),
)


@settings(max_examples=1200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=DAMAGES)
def test_a_damaged_one_is_reported_and_the_one_before_it_taken(
    damage: Damage, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    path, older = pair.restored(), pair.run_dir / FOLDER / OLDER
    damage(path, pair)
    if path.is_dir() and all((path / name).is_file() for name in FILES) and bytes_of(path) == pair.newer:
        assert_is(path, 20)  # a bit that was flipped twice, a file exchanged with itself
        return
    found = storage.newest(pair.run_dir)
    assert found is not None and found[0] == older
    assert dataclasses.replace(found[1], files={}) == manifest(10)
    assert bytes_of(older) == pair.older
    (message,) = caplog.messages
    assert message.startswith(f"{path} is damaged: ") and "\n" not in message
    hidden = older.rename(pair.run_dir / "hidden")
    try:
        with pytest.raises(UsageError) as refused:
            storage.newest(pair.run_dir)
    finally:
        hidden.rename(older)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (truncated("model.pt", 100), r"model\.pt has 100 bytes instead of \d+"),
        (flipped([("ranks.pt", 300, 1)]), r"ranks\.pt has other content than was written \(SHA-256\)"),
        (flipped([("manifest.json", 0, 7)]), r"manifest\.json is not JSON"),
        (flipped([("manifest.json", 13, 0)]), r"manifest\.json has other content than was written \(SHA-256\)"),
        (missing({"optimizer.pt"}), r"optimizer\.pt cannot be read \(No such file or directory\)"),
        (missing({"manifest.json"}), r"manifest\.json cannot be read \(No such file or directory\)"),
        (replaced("dangling link", "model.pt"), r"model\.pt cannot be read \(No such file or directory\)"),
        (replaced("circular link", "model.pt"), r"model\.pt cannot be read \(Too many levels of symbolic links\)"),
        (replaced("folder", "model.pt"), r"model\.pt cannot be read \(Not a regular file\)"),
        (replaced("file", None), r"manifest\.json cannot be read \(Not a directory\)"),
        (replaced("dangling link", None), r"manifest\.json cannot be read \(No such file or directory\)"),
        (of_the_other(set(FILES)), rf"manifest\.json is that of {OLDER}"),
        (of_the_other({"model.pt"}), r"model\.pt has other content than was written \(SHA-256\)"),
    ],
)
def test_what_is_wrong_is_said(pair: Pair, damage: Damage, problem: str) -> None:
    path = pair.restored()
    damage(path, pair)
    with pytest.raises(Damaged, match=rf"^{path} is damaged: {problem}$") as refused:
        storage.verify(path)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)  # as it crosses to another process


def test_one_that_may_not_be_read_is_reported_with_the_reason() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to the user that root becomes here
        os.chmod(folder, 0o755)
        path = write(Path(folder), 10)
        (path / "model.pt").chmod(0)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            with pytest.raises(Damaged, match=r"model\.pt cannot be read \(Permission denied\)$"):
                storage.verify(path)
        finally:
            os.seteuid(user)


def test_damaged_ones_are_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [write(tmp_path, step) for step in (10, 20, 30, 40)]
    for path in paths[1:]:
        (path / "model.pt").unlink()
    (tmp_path / FOLDER / f"damaged-{NEWER}").mkdir()
    assert storage.newest(tmp_path) == (paths[0], storage.verify(paths[0]))
    assert storage.all_of(tmp_path) == paths  # nothing is moved unless it was asked for
    caplog.clear()
    found = storage.newest(tmp_path, set_aside=True)
    assert found is not None and found[0] == paths[0]
    assert storage.all_of(tmp_path) == paths[:1]
    assert sorted(os.listdir(tmp_path / FOLDER)) == sorted(
        [OLDER, f"damaged-{NEWER}", f"damaged-{NEWER}-2", *(f"damaged-{path.name}" for path in paths[2:])]
    )
    assert f"{NEWER} is now damaged-{NEWER}-2" in caplog.messages
    caplog.clear()
    storage.newest(tmp_path, set_aside=True)
    assert not caplog.messages


def test_a_run_of_damaged_ones_does_not_become_one_without_any(tmp_path: Path) -> None:
    for step in (10, 20):
        (write(tmp_path, step) / "model.pt").unlink()
    for _ in range(2):
        with pytest.raises(
            UsageError, match=rf"no checkpoint that is whole \(2 damaged; the newest: .*{NEWER} is damag"
        ):
            storage.newest(tmp_path, set_aside=True)


# What somebody else has made of it


class Malicious:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


def forge(path: Path, **changes: Any) -> None:
    """Change a manifest's fields, or the files below it, and make its digests match."""
    content = json.loads((path / "manifest.json").read_bytes()) | changes
    del content["digest"]
    for name in content["files"] if "files" not in changes else ():
        encoded = (path / name).read_bytes()
        content["files"][name] = {"bytes": len(encoded), "sha256": hashlib.sha256(encoded).hexdigest()}
    content = {name: value for name, value in content.items() if value is not ...}
    content["digest"] = checkpoint_manifest._digest_of(content)
    (path / "manifest.json").write_bytes(checkpoint_manifest._spelled(content))


def save_zip(content: Any, path: Path) -> None:
    torch.save(content, path)


def save_pickle(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, 2))


@pytest.mark.parametrize("save", [save_zip, save_pickle])
@pytest.mark.parametrize("kind", KINDS)
def test_code_in_a_checkpoint_is_not_executed(tmp_path: Path, kind: str, save: Callable[[Any, Path], None]) -> None:
    write(tmp_path, 10)
    path, marker = write(tmp_path, 20), tmp_path / "executed"
    save({"w": Malicious(marker)}, path / f"{kind}.pt")
    found = storage.newest(tmp_path)
    assert found is not None and found[0].name == OLDER
    forge(path)
    storage.verify(path)
    with pytest.raises(Damaged, match=rf"^{path} is damaged: {kind}\.pt cannot be loaded \(UnpicklingError\)$"):
        storage.read(path, kind)
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04", b"\x80\x02N."])
def test_what_torch_cannot_load_is_damaged(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, 10)
    (path / "model.pt").write_bytes(content)
    forge(path)
    storage.verify(path)
    with pytest.raises(Damaged, match=r"model\.pt (cannot be loaded|holds a NoneType instead of a dict)"):
        storage.read(path, "model")


@pytest.mark.parametrize(("kind", "content"), [("model", [1]), ("optimizer", torch.zeros(3)), ("ranks", {"0": 1})])
def test_files_that_hold_something_else_are_refused(tmp_path: Path, kind: str, content: Any) -> None:
    path = write(tmp_path, 10)
    torch.save(content, path / f"{kind}.pt")
    forge(path)
    with pytest.raises(Damaged, match=rf"{kind}\.pt holds a {type(content).__name__} instead of a "):
        storage.read(path, kind)


FACTS = {"bytes": 1, "sha256": "0"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"step": "10"}, "has step '10', which is no int"),
        ({"epoch": True}, "has epoch True, which is no int"),
        ({"seed": 0.0}, "has seed 0.0, which is no int"),
        ({"progress": []}, r"has progress \[\], which is no dict"),
        ({"format": 1}, "has format 1"),
        ({"format": "2"}, "has format '2', which is no int"),
        ({"seed": ..., "speed": 1}, r"lacks or adds \['seed', 'speed'\]"),
        ({"epoch": 3}, "is that of epoch-0003-step-00000010"),
        ({"files": {}}, r"names the files \[\] instead of \['model\.pt', 'optimizer\.pt', 'ranks\.pt'\]"),
        (
            {"files": {"../elsewhere": FACTS, "model.pt": FACTS, "ranks.pt": FACTS}},
            r"names the files \['\.\./elsewhere', 'model\.pt', 'ranks\.pt'\] instead of",
        ),
        ({"files": {f"{kind}.pt": FACTS | {"bytes": "1"} for kind in KINDS}}, r"has no size and SHA-256 of model\.pt"),
        ({"files": {f"{kind}.pt": [1] for kind in KINDS}}, r"has no size and SHA-256 of model\.pt"),
    ],
)
def test_a_forged_manifest_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = write(tmp_path, 10)
    forge(path, **changes)
    with pytest.raises(Damaged, match=rf"^{path} is damaged: manifest\.json {problem}"):
        storage.verify(path)


@pytest.mark.parametrize("content", [b"[1, 2]", b"3", b'{"a": NaN', b"[" * 10**5, b"\xff\xfe", b"1" * 5000, b"{}"])
def test_other_things_in_a_manifest_s_place_are_damaged(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, 10)
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(Damaged, match=rf"^{path} is damaged: manifest\.json "):
        storage.verify(path)


def test_a_manifest_that_was_laid_out_anew_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path, 10)
    content = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(Damaged, match=r"manifest\.json has other content than was written"):
        storage.verify(path)


def test_files_that_are_not_named_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path, 10)
    (path / "notes.txt").write_text("the good one")
    assert_is(path, 10)


def test_a_newer_format_is_refused_though_an_older_one_is_there(tmp_path: Path) -> None:
    write(tmp_path, 10)
    path = write(tmp_path, 20)
    forge(path, format=99, seed=..., nodes=3)  # whose fields nobody knows yet
    with pytest.raises(
        UsageError, match=rf"^{path} has format 99, this version reads 2: use the one that wrote it$"
    ) as e:
        storage.newest(tmp_path, set_aside=True)
    assert not isinstance(e.value, Damaged)
    assert path.exists()


def test_format_1_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "step-00000010.pt").touch()
    with pytest.raises(
        UsageError, match=rf"^{tmp_path / FOLDER} holds checkpoints of format 1, this version reads 2: "
    ):
        storage.newest(tmp_path)
    write(tmp_path, 20)
    found = storage.newest(tmp_path)
    assert found is not None and found[0].name == NEWER


# When the disk is full


class Failing:
    """Counts what is written through the files and calls of ``storage``, and fails at the n-th."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int, error: OSError) -> None:
        self.calls, self._fail_at, self._error = 0, fail_at, error
        monkeypatch.setattr(storage, "open", self._open, raising=False)
        for name in ("fsync", "rename"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))
        monkeypatch.setattr(Path, "mkdir", self._counted(Path.mkdir))

    def _open(self, path: Path, mode: str) -> Any:
        file = open(path, mode)  # noqa: SIM115
        return file if "r" in mode else _FailingFile(file, self._counted(file.write))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._fail_at:
                raise self._error
            return function(*arguments, **options)

        return call


class _FailingFile:
    def __init__(self, file: Any, write: Callable[..., Any]) -> None:
        self._file, self.write = file, write

    def __enter__(self) -> _FailingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("replacing", [False, True])
def test_a_full_disk_at_any_write_leaves_what_was_there(tmp_path: Path, replacing: bool) -> None:
    """Also at any sync, rename and new folder."""
    older = write(tmp_path, 10)
    if replacing:
        write(tmp_path, 20)
    full = f"{tmp_path / FOLDER / NEWER} cannot be written (No space left on device): make room, then continue with --resume"
    failures = 0
    while (failure := failure_at(failures + 1, tmp_path)) is not None:
        failures += 1
        assert failure == full
        assert not litter(tmp_path)
        assert_is(older, 10)
        if replacing:
            assert_is(tmp_path / FOLDER / NEWER, 20)
        else:
            shutil.rmtree(tmp_path / FOLDER / NEWER, ignore_errors=True)  # only the sync of its name has failed
    assert failures > 60
    assert_is(tmp_path / FOLDER / NEWER, 20)


def failure_at(call: int, run_dir: Path) -> str | None:
    """Write a checkpoint on a disk that is full at the n-th call: the error, or None when there are fewer calls."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        failing = Failing(monkeypatch, call, OSError(28, "No space left on device"))
        try:
            write(run_dir, 20)
        except UsageError as error:
            return str(error)
    assert failing.calls < call  # no failure is passed over
    return None


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of ``size``."""
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounting.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounting.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    with small_disk(tmp_path, "512k") as disk:
        older = write(disk, 10)
        for kind in KINDS:  # the first, the second or the third file is the one that does not fit
            held = {"w": torch.zeros(1 << 17)}  # 512 KiB
            large = contents(20) | {kind: held if kind != "ranks" else [held]}
            with pytest.raises(UsageError, match=rf"{NEWER} cannot be written \(No space left on device\): make room"):
                storage.write(disk, manifest(20), large)
            assert os.listdir(disk / FOLDER) == [OLDER]
        assert_is(older, 10)
        assert_is(write(disk, 20), 20)


# When the process ends


def _in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function(*arguments)`` returns in a process of its own."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.apply(function, arguments)


def _write_for_ever(run_dir: Path, sender: Connection) -> None:
    """A run that goes on from its newest checkpoint, tells of each that it has written, and writes every third twice."""
    storage.clean(run_dir)
    found = storage.newest(run_dir)
    step = found[1].step if found else 0
    while True:
        step += 1
        for _ in range(2 if step % 3 == 0 else 1):
            write(run_dir, step)
            sender.send(step)
        storage.prune(run_dir, 2, best=None)


def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    moments = random.Random(0)
    seen: set[str] = set()
    for _ in range(20):
        receiver, sender = context.Pipe(duplex=False)
        with receiver:
            process = context.Process(target=_write_for_ever, args=(tmp_path, sender))
            process.start()
            sender.close()
            try:
                told = receiver.recv()
                time.sleep(moments.uniform(0, 0.05))
            finally:
                process.kill()
                process.join()
            with contextlib.suppress(EOFError):
                while True:
                    told = receiver.recv()
        seen |= {name.split("-")[0] for name in litter(tmp_path)}
        before = storage.newest(tmp_path)
        assert before is not None
        storage.clean(tmp_path)
        assert not litter(tmp_path)
        after = storage.newest(tmp_path)
        assert after is not None
        assert after[1].step >= max(told, before[1].step)
        for path in storage.all_of(tmp_path):
            assert_is(path, int(path.name[-8:]))
    assert seen  # some came in the middle of something


class _StoppedStream(storage._HashingStream):
    """SIGTERM arrives at the n-th write of each file, while torch's C++ is below us."""

    stop_at = 0

    def write(self, data: memoryview) -> int:
        self.stop_at -= 1
        if self.stop_at == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(data)


def _stopped_at_every_write(run_dir: Path) -> list[tuple[str, list[str]]]:
    storage._HashingStream = _StoppedStream  # type: ignore[misc]
    results = []
    for stop_at in range(1, 25):
        _StoppedStream.stop_at = stop_at
        try:
            with stop_signals():
                write(run_dir, 20)
        except BaseException as error:
            results.append((repr(error), litter(run_dir)))
    return results


def test_a_stop_in_the_middle_is_no_error_of_torch(tmp_path: Path) -> None:
    older = write(tmp_path, 10)
    results = _in_a_process(_stopped_at_every_write, tmp_path)
    assert results == [(f"SystemExit({128 + signal.SIGTERM})", [])] * 24
    assert_is(older, 10)
    assert storage.all_of(tmp_path) == [older]


def test_files_are_readable_as_others_are(tmp_path: Path) -> None:
    path = write(tmp_path, 10)
    (tmp_path / "other").touch()
    mode = stat.S_IMODE((tmp_path / "other").stat().st_mode)
    assert {stat.S_IMODE((path / name).stat().st_mode) for name in FILES} == {mode}
