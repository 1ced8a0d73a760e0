"""python -m ddp.checkpoint: what it prints of whole and damaged checkpoints, and its one-line errors."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch

from common.models.build import build_model
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


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr("sys.argv", ["ddp.checkpoint", *map(str, arguments)])
    checkpoint.main()


def test_inspect_checks_every_byte_of_all(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inspect lists all checkpoints, and checks every byte.

    Claim (ddp/README.md, 9): a checkpoint can be inspected and exported.
    """
    call(monkeypatch, "inspect", "--run-dir", run)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "epoch", "step", "in", "epoch", "accuracy", "size", "ranks"]
    assert [row.split()[:5] for row in rows] == [
        [name, str(epoch * 10), str(epoch), "0", "90.00"] for epoch, name in enumerate(NAMES, start=1)
    ]
    assert [row.rpartition("  2  ")[2] for row in rows] == ["whole", "whole, best", "whole"]

    model = run / FOLDER / BEST / "model.pt"
    content = bytearray(model.read_bytes())
    content[-5000] ^= 1
    model.write_bytes(content)
    (run / FOLDER / NAMES[2] / "ranks.pt").unlink()
    (run / FOLDER / f"damaged-{NAMES[0]}").mkdir()
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, "inspect", "--run-dir", run)
    assert end.value.code == 1
    _, first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("whole")
    assert f"{BEST}  damaged: model.pt has other content than was written (SHA-256)" in second
    assert third.endswith("damaged: ranks.pt cannot be read (No such file or directory)")
    assert model.read_bytes() == content  # nothing is changed


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
    output = tmp_path / "weights.pt"
    output.write_text("of before")
    call(monkeypatch, "export", "--run-dir", written, "--output", output, "--overwrite", *arguments)
    expected = f"{output}: {len(weights(step))} tensors of fashion-cnn, from {NAMES[step // 10 - 1]}\n"
    assert capsys.readouterr().out == expected
    assert os.listdir(tmp_path) == ["weights.pt"]
    network = build_model(MODEL, SHAPE, CLASSES)
    network.load_state_dict(torch.load(output, weights_only=True))
    for name, value in weights(step).items():
        assert torch.equal(network.state_dict()[name], value)


def test_user_errors_are_one_line(written: Path, run: Path, tmp_path: Path, user_error: UserError) -> None:
    main, there = checkpoint.main, tmp_path / "there"
    there.write_text("mine")
    begun, output = tmp_path / "begun", tmp_path / "weights.pt"
    shutil.copytree(written, begun, ignore=shutil.ignore_patterns("epoch-*"))
    assert "unknown command 'list': there is inspect, export" in user_error(main, "list")
    for gone in (("import", "--input", "x"), ("export", "--format", "dcp")):
        assert "torch_save_to_dcp" in user_error(main, *gone)
    for name in ("inspect", "export"):
        assert f"{there / FOLDER} cannot be read (Not a directory)" in user_error(main, name, "--run-dir", there)
        assert f"--run-dir {begun} holds no checkpoint yet: " in user_error(main, name, "--run-dir", begun)

    def export(*arguments: str | Path) -> str:
        return user_error(main, "export", "--run-dir", run, *arguments)

    assert f"--output {there} is there already: give another name (--overwrite" in export("--output", there)
    link = tmp_path / "link"
    link.symlink_to(there)  # as root, a rename would have replaced /dev/null
    for other in (link, tmp_path):
        assert "replaces a regular file only" in export("--output", other, "--overwrite")
    assert link.is_symlink() and there.read_text() == "mine"
    (run / FOLDER / BEST / "model.pt").unlink()
    assert f"{BEST} is damaged: model.pt cannot be read" in export("--checkpoint", "best", "--output", output)
    shutil.rmtree(run / FOLDER / BEST)
    left = f"--checkpoint {BEST}: there is only {NAMES[0]}, {NAMES[2]}"
    assert left in export("--checkpoint", "best", "--output", output)
    add_checkpoint(run, 40, best=None)
    assert "--checkpoint best: the run has evaluated none yet" in export("--checkpoint", "best", "--output", output)
    assert not output.exists()


def test_help_lists_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call(monkeypatch)
    assert "commands: inspect, export" in capsys.readouterr().out
