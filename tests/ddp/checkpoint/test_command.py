"""python -m ddp.checkpoint: what it prints of whole and damaged checkpoints, and its one-line errors."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch

from common.training.models import build_model
from ddp.checkpoint import __main__ as checkpoint
from ddp.checkpoint import storage
from ddp.checkpoint.storage import FOLDER
from tests.ddp.checkpoint.samples import contents, manifest
from tests.support.user_errors import UserError

NAMES = [f"epoch-{epoch:04d}-step-{epoch * 10:08d}" for epoch in (1, 2, 3)]
BEST = NAMES[1]
MODEL, SHAPE, CLASSES = "fashion-cnn", (1, 12, 12), 3


def weights(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return build_model(MODEL, SHAPE, CLASSES).state_dict()


def add_checkpoint(run_dir: Path, step: int, best: str | None) -> None:
    progress = manifest(step).progress | {"accuracy": 0.9, "best": best and {"name": best, "accuracy": 0.912}}
    facts = dataclasses.replace(manifest(step), config={"model": MODEL, "lr": 0.1}, progress=progress)
    storage.write(run_dir, facts, contents(step) | {"model": weights(step)})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints, of which the second is the best."""
    folder = tmp_path_factory.mktemp("runs") / "written"
    folder.mkdir()
    (folder / "config.json").write_text('{"dataset_fingerprint": "abc"}')
    for step in (10, 20, 30):
        add_checkpoint(folder, step, BEST if step > 10 else None)
    return folder


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(written, tmp_path / "run"))


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What the command prints when there is no error."""
    monkeypatch.setattr("sys.argv", ["ddp.checkpoint", *map(str, arguments)])
    checkpoint.main()
    out, err = capsys.readouterr()
    assert "error" not in err
    return out


def state_of(run_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def damaged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Path) -> str:
    """What inspect prints, with status 1 and without changing anything."""
    before = state_of(run)
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, capsys, "inspect", "--run-dir", run)
    out, err = capsys.readouterr()
    assert (end.value.code, err) == (1, "")
    assert state_of(run) == before
    return out


def test_inspect_lists_all_and_describes_the_newest_whole_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inspect lists all and describes the newest whole one.

    Claim (ddp/README.md, 9): a checkpoint can be inspected and exported.
    """
    (run / FOLDER / NAMES[2] / "ranks.pt").write_bytes(b"")
    (run / FOLDER / f"damaged-{NAMES[0]}").mkdir()
    table, facts = damaged(monkeypatch, capsys, run).split("\n\n")
    header, *rows = table.splitlines()
    assert header.split() == ["step", "epoch", "step", "in", "epoch", "accuracy", "size", "ranks"]
    assert [row.split()[0] for row in rows] == NAMES
    assert rows[0].split()[1:5] == ["10", "1", "0", "90.00"] and rows[0].endswith("  2  whole")
    assert rows[1].endswith("  2  whole, best")
    assert rows[2].split(maxsplit=1)[1].startswith("damaged: ranks.pt has 0 bytes instead of ")
    assert facts.startswith(
        f"{NAMES[1]}, the newest that is whole (all of its facts are in its manifest.json):\n432 training "
    )
    for fact in (f"; torch {torch.__version__}", " --lr=0.1", "--model=fashion-cnn "):
        assert fact in facts
    assert len(facts.splitlines()) < 16 and max(map(len, facts.splitlines())) <= 100


def test_inspect_if_all_are_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in NAMES:
        (run / FOLDER / name / "manifest.json").unlink()
    out = damaged(monkeypatch, capsys, run)
    assert out.count("damaged: manifest.json cannot be read (No such file or directory)") == 3
    assert "newest" not in out


def test_inspect_checks_every_byte(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inspect checks every byte.

    Claim (ddp/README.md, 9): a checkpoint can be inspected and exported.
    """
    assert call(monkeypatch, capsys, "inspect", "--run-dir", run).count("  whole") == len(NAMES)
    model = run / FOLDER / BEST / "model.pt"
    content = bytearray(model.read_bytes())
    content[-5000] ^= 1
    model.write_bytes(content)
    out = damaged(monkeypatch, capsys, run)
    assert f"{BEST}  damaged: model.pt has other content than was written (SHA-256)" in out
    assert out.count("  whole") == 2


@pytest.mark.parametrize(
    ("arguments", "step"), [((), 30), (("--checkpoint", "best"), 20), (("--checkpoint", NAMES[0]), 10)]
)
def test_export_writes_the_weights_of_the_plain_module(
    written: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    step: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Export writes the weights of the plain module.

    Claim (ddp/README.md, 9): a checkpoint can be inspected and exported.
    """
    output, before = tmp_path / "weights.pt", state_of(written)
    out = call(monkeypatch, capsys, "export", "--run-dir", written, "--output", output, *arguments)
    assert out == f"{output}: {len(weights(step))} tensors of fashion-cnn, from {NAMES[step // 10 - 1]}\n"
    assert os.listdir(tmp_path) == ["weights.pt"]
    network = build_model(MODEL, SHAPE, CLASSES)
    network.load_state_dict(torch.load(output, weights_only=True))
    for name, value in weights(step).items():
        assert torch.equal(network.state_dict()[name], value)
    assert state_of(written) == before


def test_export_passes_over_a_damaged_one_and_replaces_a_file_with_overwrite(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "weights.pt"
    output.write_text("mine")
    (run / FOLDER / NAMES[2] / "model.pt").write_bytes(b"")
    monkeypatch.setattr(
        "sys.argv", ["ddp.checkpoint", "export", "--run-dir", str(run), "--output", str(output), "--overwrite"]
    )
    checkpoint.main()
    out, err = capsys.readouterr()
    assert f"from {NAMES[1]}" in out
    assert f"{NAMES[2]} is damaged: model.pt has 0 bytes" in err
    assert torch.equal(torch.load(output, weights_only=True)["classifier.6.bias"], weights(20)["classifier.6.bias"])


def test_user_errors_are_one_line(written: Path, run: Path, tmp_path: Path, user_error: UserError) -> None:
    main, there = checkpoint.main, tmp_path / "there"
    there.write_text("mine")
    empty, begun, nowhere = tmp_path / "empty", tmp_path / "begun", tmp_path / "nowhere"
    empty.mkdir()
    shutil.copytree(written, begun, ignore=shutil.ignore_patterns("epoch-*"))
    assert "unknown command 'list': there is inspect, export" in user_error(main, "list")
    assert "--keep" in user_error(main, "inspect", "--run-dir", run, "--keep", "1")
    for name in ("inspect", "export"):
        assert f"--run-dir {empty} holds no run: " in user_error(main, name, "--run-dir", empty)
        assert f"--run-dir {nowhere} holds no run: " in user_error(main, name, "--run-dir", nowhere)
        assert f"{there / FOLDER} cannot be read (Not a directory)" in user_error(main, name, "--run-dir", there)
        assert f"--run-dir {begun} holds no checkpoint yet: " in user_error(main, name, "--run-dir", begun)

    def export(*arguments: str | Path) -> str:
        return user_error(main, "export", "--run-dir", run, *arguments)

    assert f"--checkpoint epoch-9: there is only {', '.join(NAMES)}" in export("--checkpoint", "epoch-9")
    assert f"--output {there} is there already: give another name (export --overwrite" in export("--output", there)
    assert there.read_text() == "mine"
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(there)  # as root, a rename would have replaced /dev/null
    os.mkfifo(pipe)
    for output in (link, pipe):
        assert "replaces a regular file only" in export("--output", output, "--overwrite")
        assert output.is_symlink() or output.is_fifo()
    assert f"--output {tmp_path} is there already: give another name" in export("--output", tmp_path, "--overwrite")
    for folder, reason in ((nowhere, "No such file or directory"), (there, "Not a directory")):
        output = folder / "weights.pt"
        assert f"--output {output} cannot be written ({reason})" in export("--output", output)
    (run / FOLDER / BEST / "model.pt").unlink()
    output = tmp_path / "weights.pt"
    assert f"{BEST} is damaged: model.pt cannot be read" in export("--checkpoint", "best", "--output", output)
    shutil.rmtree(run / FOLDER / BEST)
    assert f"--checkpoint {BEST}: there is only " in export("--checkpoint", "best", "--output", output)
    add_checkpoint(run, 40, best=None)
    assert "--checkpoint best: the run has evaluated none yet" in export("--checkpoint", "best", "--output", output)
    assert not output.exists()


def test_help_lists_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--help",)):
        assert "commands: inspect, export" in call(monkeypatch, capsys, *arguments)
