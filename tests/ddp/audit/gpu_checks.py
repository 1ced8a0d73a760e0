# mypy: ignore-errors
"""A script for GPUs, run on a stand-in by test_gpu.py: what a script can see of a GPU is as it would be there."""

import copy
import io
import os
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

rank = int(os.environ["RANK"])


def devices() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    torch.cuda.set_device(rank)
    assert torch.cuda.current_device() == rank
    with torch.cuda.device(1 - rank):
        assert torch.cuda.current_device() == 1 - rank
    assert torch.cuda.current_device() == rank
    assert len({torch.cuda.get_device_properties(device).uuid for device in range(2)}) == 2
    assert torch.accelerator.current_accelerator().type == "cuda"
    assert "needs a GPU" in error_of(torch.cuda.make_graphed_callables, nn.Linear(1, 1), ())
    assert "invalid device ordinal" in error_of(torch.cuda.set_device, 2)


def moves() -> None:
    """A move is a copy, also of what it is not a copy of on a CPU."""
    on_cpu = torch.zeros(3, requires_grad=True)
    moved = on_cpu.cuda()
    assert not moved.is_leaf and moved.is_cuda
    moved.sum().backward()
    assert on_cpu.grad.tolist() == [1, 1, 1]
    batch = torch.zeros(3)
    for device in ("cuda", torch.device("cuda", rank), rank):
        batch.to(device).add_(1)
    batch.to(device="cuda", non_blocking=True).add_(1)
    batch.type("torch.cuda.FloatTensor").add_(1)
    torch.as_tensor(batch, device="cuda").add_(1)
    assert batch.sum() == 0
    assert batch.to("cuda", torch.float16).dtype == torch.float16
    moved = batch.cuda()
    assert moved.cuda() is moved and moved.to("cuda") is moved  # it is there
    model = nn.Linear(2, 2).to("cuda")
    weight = model.weight
    saved = {name: value.cpu() for name, value in model.state_dict().items()}
    model.cuda().weight.data.add_(1)
    assert model.weight is weight and not torch.equal(saved["weight"], weight)
    assert torch.zeros(2, 4)[:, :3].pin_memory().to("cuda").is_contiguous()
    in_worker = DataLoader([torch.zeros(1)], collate_fn=lambda samples: samples[0].is_cuda, num_workers=1)
    assert list(in_worker) == [False]


def factories() -> None:
    for tensor in (
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device=f"cuda:{rank}"),
        torch.randn_like(torch.zeros(2), device="cuda"),
        torch.zeros(2).new_ones(2, device="cuda"),
        torch.randperm(4, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)),
        torch.cuda.FloatTensor([1, 2]),
        nn.Linear(2, 2, device="cuda").weight,
    ):
        assert tensor.is_cuda
        tensor.to(tensor.device)
    with torch.device("cuda"):
        assert nn.Linear(2, 2).weight.is_cuda
    assert isinstance(torch.default_generator, torch.Generator)

    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(x.shape[0], device=x.device)

    assert scripted(torch.ones(2, device="cuda")).sum() == 2


def files() -> None:
    file = io.BytesIO()
    torch.save({"weight": torch.ones(2, device="cuda")}, file)
    for where in (
        None,
        "cuda",
        f"cuda:{rank}",
        {"cuda:0": f"cuda:{rank}"},
        lambda storage, location: storage.cuda(rank),
    ):
        file.seek(0)
        assert torch.load(file, map_location=where)["weight"].sum() == 2
    copy.deepcopy(nn.Linear(2, 2).cuda())


def streams() -> None:
    side = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.zeros(2, device="cuda").record_stream(side)
    end.record(side)
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) >= 0
    assert torch.cuda.max_memory_allocated() == 0
    torch.cuda.reset_peak_memory_stats()
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)


def randomness() -> None:
    """The GPU has a generator of its own, from which modules draw there; torch.manual_seed seeds both."""
    dropout = nn.Sequential(nn.Linear(8, 64, device="cuda"), nn.Dropout())
    torch.manual_seed(0)
    on_cpu, mask = torch.rand(3), dropout(torch.ones(8).cuda()) == 0
    torch.manual_seed(0)
    torch.cuda.manual_seed(1)
    assert not torch.equal(dropout(torch.ones(8).cuda()) == 0, mask)
    assert torch.equal(torch.rand(3), on_cpu)
    torch.manual_seed(0)
    repeated = torch.utils.checkpoint.checkpoint(dropout, torch.ones(8).cuda(), use_reentrant=False)
    assert torch.equal(repeated == 0, mask)
    repeated.sum().backward()
    assert dropout[0].bias.grad.tolist() == [0 if dropped else 2 for dropped in mask]


def groups() -> None:
    assert dist.is_nccl_available() and dist.get_backend() == "nccl"
    dist.barrier(device_ids=[rank])
    for async_op in (False, True):
        tensor = torch.tensor([2.0 * rank if async_op else 2 * rank], device="cuda")
        work = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=async_op)
        if async_op:
            work.wait()
            work.wait()
        assert tensor == 1
    gathered = [torch.zeros(1, device="cuda") for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([rank + 1.0], device="cuda", requires_grad=True))
    assert gathered[1] == 2
    whole = torch.zeros(4, device="cuda")  # NCCL counts elements only
    dist.all_gather_into_tensor(output_tensor=whole, input_tensor=torch.full((1, 2), rank + 1.0, device="cuda"))
    assert whole.tolist() == [1, 1, 2, 2]
    side = dist.new_group([0, 1], backend="nccl")
    shard = torch.zeros(1, device="cuda")
    dist.reduce_scatter_tensor(shard, torch.tensor([[1.0], [3.0]], device="cuda"), op=dist.ReduceOp.AVG, group=side)
    assert shard == (1, 3)[rank]
    assert init_device_mesh("cuda", (2,)).size() == 2


def batchnorm() -> None:
    """The batches of both ranks are normalized as one."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(8, 3, 4, generator=generator)
    expected, synchronized = nn.BatchNorm1d(3), nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)).cuda()
    own = DistributedDataParallel(synchronized, device_ids=[rank], output_device=rank)(whole[rank::2].cuda())
    torch.testing.assert_close(own, expected(whole)[rank::2])
    torch.testing.assert_close(synchronized.running_var, expected.running_var)
    assert synchronized.eval()(own).shape == own.shape


def precision() -> None:
    model = torch.compile(nn.Linear(4, 4).cuda())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    assert scaler.is_enabled()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.mse_loss(model(torch.ones(2, 4, device="cuda")), torch.zeros(2, 4, device="cuda"))
    torch.ones(1, dtype=torch.bfloat16).numpy()  # in the place of fp16
    scaler.scale(loss).backward()
    assert model.weight.grad.abs().max() > 100  # scaled by 65,536
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    with warnings.catch_warnings(action="ignore"), torch.cuda.amp.autocast(enabled=False):
        assert model(torch.ones(1, 4).cuda()).dtype == torch.float32


def error_of(function: Callable[..., object], *arguments: object) -> str:
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
for check in (devices, moves, factories, files, streams, randomness, groups, batchnorm, precision):
    check()
dist.destroy_process_group()
