"""``python -m ddp.audit.gpu``: scripts for GPUs on a stand-in, and what the audit says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.launch import run_command

JOB = """
import os, sys
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).to(device)
model = DistributedDataParallel(model, device_ids=[rank], output_device=rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
images = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(images, torch.arange(64) % 10)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler, num_workers=1, pin_memory=True)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
if rank == 0:
    torch.save(model.module.state_dict(), sys.argv[1])
dist.destroy_process_group()
"""
# The same job as people rewrite it for CPUs.
FOR_CPUS = {
    '"nccl"': '"gloo"',
    "torch.cuda.set_device(rank)\n": "",
    'torch.device("cuda", rank)': 'torch.device("cpu")',
    ", device_ids=[rank], output_device=rank": "",
    ", pin_memory=True": "",
    "x.cuda(non_blocking=True)": "x",
}


@pytest.mark.examples
def test_a_script_sees_what_it_would_see_of_a_gpu() -> None:
    done = run_command("ddp.audit.gpu", "--", str(Path(__file__).parent / "gpu_checks.py"))
    assert done.returncode == 0, done.stderr
    assert "stand-in GPU: autocast in float16 runs in bfloat16\n" in done.stderr


@pytest.mark.examples
def test_a_gpu_script_trains_as_its_cpu_form(tmp_path: Path) -> None:
    """Its weights are the same to the last bit."""
    for_cpus = JOB
    for gpu, cpu in FOR_CPUS.items():
        assert gpu in for_cpus
        for_cpus = for_cpus.replace(gpu, cpu)
    weights = {}
    for name, script, command in (("gpu", JOB, "ddp.audit.gpu"), ("cpu", for_cpus, "torch.distributed.run")):
        path = tmp_path / f"{name}.py"
        path.write_text(script)
        options = ["--"] if name == "gpu" else ["--standalone", "--nproc_per_node=2"]
        done = run_command(command, *options, str(path), str(tmp_path / f"{name}.pt"))
        assert done.returncode == 0, done.stderr
        weights[name] = torch.load(tmp_path / f"{name}.pt")
    assert all(map(torch.equal, weights["gpu"].values(), weights["cpu"].values()))


@pytest.mark.examples
def test_the_audit_finds_a_bug_in_a_script_for_gpus(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB.replace("model(x), y", "model.module(x), y").replace("sys.argv[1]", '"weights.pt"'))
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "model.module(x)" in text)
    done = run_command("ddp.audit", "--", "job.py", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert f"job.py:{line}: around-the-wrapper: " in done.stdout
    assert "2 ranks on stand-in GPUs, " in done.stdout


@pytest.mark.examples
def test_dropout_of_nothing_draws_nothing_on_a_stand_in(tmp_path: Path) -> None:
    """So the second run compares numbers."""
    (tmp_path / "job.py").write_text(JOB.replace("nn.BatchNorm2d(4)", "nn.Dropout(0.0)"))
    done = run_command("ddp.audit", "--", "job.py", "{run}/weights.pt", cwd=tmp_path)
    assert "on 1 rank with the batches of 2: the same samples, and gradients within " in done.stdout


BOTH_WAYS = """
import sys
import torch.distributed as dist
import torch.multiprocessing as mp
def main(rank=-1, world_size=-1):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    print(f"{dist.get_world_size()} ranks\\n", end="")  # in one write: the ranks share the stream
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(main, (2,), nprocs=2) if "--spawn" in sys.argv else main()
"""


@pytest.mark.examples
def test_a_script_that_could_spawn_its_ranks_and_does_not_gets_torchrun(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(BOTH_WAYS)
    done = run_command("ddp.audit.gpu", "--", "job.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("2 ranks") == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import flash_attn", "the script needs kernels of a GPU: job.py:1 imports flash_attn"),
        ("import torch, wandb_2", "the script needs a package that is missing: job.py:1 imports wandb_2"),
        ("open('faces.zip')", "the script needs a file that is not there: job.py:1: FileNotFoundError: "),
        ("import json; json.loads('?')", "the script failed: job.py:1: json.decoder.JSONDecodeError: "),
    ],
)
def test_what_a_script_lacks_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "job.py").write_text(line)
    done = run_command("ddp.audit", "--start", "python", "--", "job.py", cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
