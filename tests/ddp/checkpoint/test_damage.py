"""ddp/checkpoint: whatever happens to the files of a checkpoint is found and named, and the one before it is used."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UsageError
from ddp.checkpoint import list_checkpoints, save, storage
from ddp.checkpoint.folder import Damaged
from ddp.checkpoint.storage import FOLDER, KINDS
from tests.ddp.checkpoint.samples import FILES, NEWER, OLDER, Malicious, assert_is, forge, manifest, sign, write


@dataclasses.dataclass
class Pair:
    """A run with two checkpoints, and the bytes of both; the newer one is to be damaged."""

    run_dir: Path
    older: dict[str, bytes]
    newer: dict[str, bytes]

    def restored(self) -> Path:
        """The newer checkpoint as it was written."""
        path = self.run_dir / FOLDER / NEWER
        shutil.rmtree(path)
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


Damage = Callable[[Path, Pair], object]
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
    return lambda path, pair: (path / file).write_bytes(pair.newer[file] + tail)


def of_the_other(files: set[str]) -> Damage:
    """Files of the checkpoint before, with or without its manifest and digests."""

    def damage(path: Path, pair: Pair) -> None:
        for file in files:
            (path / file).write_bytes(pair.older[file])

    return damage


def replaced(kind: str, file: str) -> Damage:
    """A file is removed, or something of another kind is in its place."""

    def damage(path: Path, pair: Pair) -> None:
        target = path / file
        target.unlink()
        if kind == "folder":
            target.mkdir()
        elif kind == "link to nowhere":
            target.symlink_to("nowhere")

    return damage


KINDS_OF_REPLACEMENT = ("nothing", "folder", "link to nowhere")
DAMAGES = st.one_of(
    st.builds(truncated, ONE_FILE, OFFSETS),
    st.builds(flipped, st.lists(st.tuples(ONE_FILE, OFFSETS, st.integers(0, 7)), min_size=1, max_size=8)),
    st.builds(appended, ONE_FILE, st.binary(min_size=1, max_size=64)),
    st.builds(of_the_other, st.sets(ONE_FILE, min_size=1)),
    st.builds(replaced, st.sampled_from(KINDS_OF_REPLACEMENT), ONE_FILE),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=DAMAGES)
def test_a_damaged_one_is_reported_and_the_one_before_it_used(
    damage: Damage, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged checkpoint is reported by name, and the one before it is used.

    Claim (ddp/README.md, 9): the newest checkpoint whose checksums are right is taken; nothing in it is executed.
    """
    caplog.clear()
    path, older = pair.restored(), pair.run_dir / FOLDER / OLDER
    damage(path, pair)
    if path.is_dir() and all((path / name).is_file() for name in FILES) and bytes_of(path) == pair.newer:
        assert_is(path, 20)  # a bit that was flipped twice
        return
    found = storage.newest(pair.run_dir)
    assert found is not None and found[0] == older
    assert found[1] == manifest(10)
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
        (flipped([("manifest.json", 0, 7)]), r"manifest\.json has other content than was written \(SHA-256\)"),
        (flipped([("SHA256SUMS", 0, 7)]), "SHA256SUMS has other content than was written"),
        (replaced("nothing", "SHA256SUMS"), r"SHA256SUMS cannot be read \(No such file or directory\)"),
        (replaced("folder", "model.pt"), r"model\.pt cannot be read \(Is a directory\)"),
        (of_the_other(set(FILES)), r"manifest\.json is that of step 10"),
    ],
)
def test_the_problem_is_named(pair: Pair, damage: Damage, problem: str) -> None:
    path = pair.restored()
    damage(path, pair)
    with pytest.raises(Damaged, match=rf"^{path} is damaged: {problem}$") as refused:
        storage.verify(path)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)  # as from rank to rank


def test_damaged_ones_are_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [write(tmp_path, step) for step in (10, 20, 30)]
    for path in paths[1:]:
        (path / "model.pt").unlink()
    (tmp_path / FOLDER / f"damaged-{NEWER}").mkdir()
    assert storage.newest(tmp_path) == (paths[0], storage.verify(paths[0]))
    assert list_checkpoints(tmp_path / FOLDER) == paths  # nothing is moved without set_aside
    storage.newest(tmp_path, set_aside=True)
    assert list_checkpoints(tmp_path / FOLDER) == paths[:1]
    assert sorted(os.listdir(tmp_path / FOLDER)) == sorted(
        [OLDER, f"damaged-{NEWER}", f"damaged-{NEWER}-2", f"damaged-{paths[2].name}"]
    )
    assert f"{NEWER} is now damaged-{NEWER}-2" in caplog.messages
    (paths[0] / "model.pt").unlink()
    for _ in range(2):  # if all are damaged, none is set aside
        with pytest.raises(
            UsageError, match=rf"no checkpoint that is whole \(1 damaged; the newest: .*{OLDER} is damaged"
        ):
            storage.newest(tmp_path, set_aside=True)


@pytest.mark.parametrize("kind", KINDS)
def test_code_in_a_checkpoint_is_not_executed(tmp_path: Path, kind: str) -> None:
    """Code in a checkpoint is not executed.

    Claim (ddp/README.md, 9): the newest checkpoint whose checksums are right is taken; nothing in it is executed.
    """
    path, marker = write(tmp_path, 20), tmp_path / "executed"
    torch.save({"w": Malicious(marker)}, path / f"{kind}.pt")
    forge(path)
    storage.verify(path)
    with pytest.raises(Damaged, match=rf"^{path} is damaged: {kind}\.pt cannot be loaded \(UnpicklingError\)$"):
        storage.read(path, kind)
    assert not marker.exists()


def test_names_that_leave_the_folder_are_damage(tmp_path: Path) -> None:
    """In the manifest and in the digests."""
    path = write(tmp_path, 10)
    (tmp_path / FOLDER / "elsewhere.pt").touch()
    sums = (path / "SHA256SUMS").read_text()
    forge(path, files={"../elsewhere.pt": 0})
    with pytest.raises(Damaged, match=r"SHA256SUMS lists .* instead of"):
        storage.verify(path)
    (path / "SHA256SUMS").write_text(f"{sums}{'0' * 64}  ../elsewhere.pt\n")
    with pytest.raises(Damaged, match="SHA256SUMS has other content"):
        storage.verify(path)


@pytest.mark.parametrize("content", [b"[1, 2]", b"[" * 10**5, b"\xff\xfe"])
def test_another_program_s_manifest_is_damage(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, 10)
    (path / "manifest.json").write_bytes(content)
    sign(path)
    with pytest.raises(Damaged, match=r"manifest\.json is not one of a checkpoint"):
        storage.verify(path)
    save(tmp_path / FOLDER, 10, {"model": {}}, {"seed": 0}, name=OLDER)
    with pytest.raises(Damaged, match=r"manifest\.json is not one of a run"):
        storage.verify(path)


def test_another_format_is_refused_even_if_an_older_checkpoint_is_whole(tmp_path: Path) -> None:
    write(tmp_path, 10)
    path = write(tmp_path, 20)
    forge(path, format=4, seed=..., nodes=3)  # fields that this version does not know
    refusal = f"{path} has the format 4, this version reads 5: use the one that wrote it"
    with pytest.raises(UsageError) as refused:
        storage.newest(tmp_path, set_aside=True)
    assert str(refused.value) == refusal and not isinstance(refused.value, Damaged)
    assert len(list_checkpoints(tmp_path / FOLDER)) == 2
