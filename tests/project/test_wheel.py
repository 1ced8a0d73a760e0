"""The wheel, without the checkout: it has all that its commands need, and none of the tools for this repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY, run_command

SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "docs", "results", "tests")
    source = shutil.copytree(REPOSITORY, folder / "source", ignore=left_out)
    build = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(source))
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder / "site")
    return folder / "site"


@pytest.mark.examples
def test_its_commands_run(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    small = "--device cpu --epochs 1 --train-samples 288 --test-samples 100 --model mlp --run-dir run"
    for command in (
        f"torch.distributed.run --nproc_per_node=2 -m ddp.train {small}",
        "ddp.audit --quick -- script.py",
        "ddp.audit --explain same-order",
        "ddp.conformance --help",
        "dataparallel.train --help",
        "dataloading.bench --help",
        "ddp.launch.doctor --help",
    ):
        done = run_command(*command.split(), cwd=tmp_path, env={"PYTHONPATH": str(installed)}, timeout_s=250)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


@pytest.mark.examples
def test_it_holds_the_four_packages(installed: Path) -> None:
    packages = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert packages == {"common", "dataloading", "dataparallel", "ddp"}
    assert not (installed / "ddp" / "audit" / "libraries").exists()
