"""ddp/checkpoint: nothing in a checkpoint is executed, and forged, newer and older ones are refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UsageError
from ddp.checkpoint import save, storage
from ddp.checkpoint.__main__ import main as checkpoint_main
from ddp.checkpoint.folder import Damaged
from ddp.checkpoint.storage import FOLDER, KINDS
from ddp.evaluate import main as evaluate_main
from tests.ddp.checkpoint.samples import NEWER, OLDER, assert_is, forge, manifest, sign, write
from tests.support.user_errors import UserError


class Malicious:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


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


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"step": "10"}, "has step '10', which is no int"),
        ({"epoch": True}, "has epoch True, which is no int"),
        ({"seed": 0.0}, "has seed 0.0, which is no int"),
        ({"progress": []}, r"has progress \[\], which is no dict"),
        ({"format": "3"}, "has format '3', which is no int"),
        ({"facts": 1}, "has facts 1, which is no dict"),
        ({"facts": {}}, r"lacks or adds \['batch_size', "),
        ({"seed": ..., "speed": 1}, r"lacks or adds \['seed', 'speed'\]"),
        ({"format": ...}, r"lacks or adds \['format'\]"),
        ({"epoch": 3}, "is that of epoch-0003-step-00000010"),
        ({"step": 11}, "is that of step 11"),
        ({"files": {"../elsewhere.pt": 1}}, r"lists the file '\.\./elsewhere\.pt' with 1 bytes"),
        ({"files": {"manifest.json": 1}}, r"lists the file 'manifest\.json' with 1 bytes"),
        ({"files": {"model.pt": "1"}}, r"lists the file 'model\.pt' with '1' bytes"),
        ({"files": {"model.pt": [1]}}, r"lists the file 'model\.pt' with \[1\] bytes"),
        ({"files": []}, r"has files \[\], which is no dict"),
    ],
)
def test_a_forged_manifest_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = write(tmp_path, 10)
    forge(path, **changes)
    with pytest.raises(Damaged, match=rf"^{path} is damaged: manifest\.json {problem}"):
        storage.verify(path)


def test_a_checkpoint_without_a_file_of_the_trainer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FOLDER
    path.mkdir()
    save(path, 10, {"model": {}, "optimizer": {}}, manifest(10).facts(), name=OLDER)
    with pytest.raises(Damaged, match=r"lists the files \['model\.pt', 'optimizer\.pt'\] without \['ranks\.pt'\]$"):
        storage.verify(path / OLDER)


@pytest.mark.parametrize(
    "line", ["../../model.pt", "/etc/passwd", "notes.txt", "model.pt", "two words", "", "model.pt\n", "mödel.pt"]
)
def test_forged_digests_are_refused(tmp_path: Path, line: str) -> None:
    """Another name, one more name, a name twice."""
    path = write(tmp_path, 10)
    sums = path / "SHA256SUMS"
    before = sums.read_text()
    for content in (f"{before}{'0' * 64}  {line}\n", f"{'0' * 64}  {line}\n{before}", before.replace("ranks.pt", line)):
        sums.write_text(content)
        with pytest.raises(Damaged, match=rf"^{path} is damaged: SHA256SUMS (lists|has other content)"):
            storage.verify(path)


@pytest.mark.parametrize("content", [b"[1, 2]", b"3", b'{"a": NaN', b"[" * 10**5, b"\xff\xfe", b"1" * 5000, b"{}"])
def test_other_content_in_place_of_a_manifest_is_damage(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, 10)
    (path / "manifest.json").write_bytes(content)
    for _ in range(2):  # with the wrong digest, and with the right one
        with pytest.raises(Damaged, match=rf"^{path} is damaged: manifest\.json "):
            storage.verify(path)
        sign(path)


def test_a_manifest_with_other_white_space_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path, 10)
    content = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(Damaged, match=r"manifest\.json has other content than was written"):
        storage.verify(path)


def test_files_that_are_not_listed_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path, 10)
    (path / "notes.txt").write_text("the good one")
    assert_is(path, 10)


def test_a_newer_format_is_refused_even_if_an_older_checkpoint_is_whole(tmp_path: Path) -> None:
    write(tmp_path, 10)
    path = write(tmp_path, 20)
    forge(path, format=99, seed=..., nodes=3)  # fields that this version does not know
    problem = rf"^{path} has the newer format 99, this version reads 3 and 4: use the one that wrote it$"
    with pytest.raises(UsageError, match=problem) as refused:
        storage.newest(tmp_path, set_aside=True)
    assert not isinstance(refused.value, Damaged)
    assert path.exists()


def to_format_2(path: Path) -> None:
    """Rewrite a checkpoint as format 2 had it: no SHA256SUMS; a manifest with the digests of the files, and its own."""
    content = json.loads((path / "manifest.json").read_bytes())
    files = {}
    for name in content["files"]:
        encoded = (path / name).read_bytes()
        files[name] = {"bytes": len(encoded), "sha256": hashlib.sha256(encoded).hexdigest()}
    facts = content["facts"]
    facts["position"], facts["micro_steps"] = facts.pop("step_in_epoch"), facts.pop("grad_accumulation_steps")
    del facts["extra"]
    old = {"step": content["step"], **facts, "files": files, "format": 2}
    compact = json.dumps(old, sort_keys=True, separators=(",", ":")).encode("ascii")
    old["digest"] = hashlib.sha256(compact).hexdigest()
    (path / "manifest.json").write_text(json.dumps(old, indent=2) + "\n")
    (path / "SHA256SUMS").unlink()


def test_format_2_is_refused_in_one_line(
    tmp_path: Path, user_error: UserError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the function that ``--resume`` calls, by ``ddp.evaluate`` and by each command of ``ddp.checkpoint``."""
    to_format_2(write(tmp_path, 10))
    path = write(tmp_path, 20)
    to_format_2(path)
    refusal = f"{path} has the older format 2, this version reads 3 and 4: use the one that wrote it"
    with pytest.raises(UsageError) as refused:
        storage.newest(tmp_path, set_aside=True)
    assert str(refused.value) == refusal
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refusal in user_error(evaluate_main, "--run-dir", tmp_path, "--device", "cpu")
    for name in ("inspect", "verify", "export"):
        arguments = ("--output", tmp_path / "weights.pt") if name == "export" else ()
        line = user_error(checkpoint_main, name, "--run-dir", tmp_path, *arguments)
        assert "has the older format 2, this version reads 3 and 4: use the one that wrote it" in line
    assert sorted(os.listdir(tmp_path / FOLDER)) == [OLDER, NEWER]


def test_format_1_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "step-00000010.pt").touch()
    problem = (
        rf"^{tmp_path / FOLDER} holds checkpoints of the older format 1, this version reads 3 and 4: use the one that "
    )
    with pytest.raises(UsageError, match=problem):
        storage.newest(tmp_path)
    write(tmp_path, 20)
    found = storage.newest(tmp_path)
    assert found is not None and found[0].name == NEWER
