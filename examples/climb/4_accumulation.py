"""Accumulation: a global batch that does not fit is split into micro-batches, whose gradients add up before the step.
torchrun --nproc_per_node=2 examples/climb/4_accumulation.py
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

EPOCHS, BATCH_SIZE = 4, 48  # samples of an optimizer step
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MICRO_STEPS = 2


def main() -> None:
    torch.manual_seed(0)  # the same data and initial weights in every run
    labels = torch.randint(10, (763,))
    inputs = torch.randn(10, 32)[labels] + 1.5 * torch.randn(763, 32)  # ten clusters that overlap
    data = TensorDataset(inputs.to(DEVICE), labels.to(DEVICE))  # larger data moves to the GPU batch by batch
    train, test = random_split(data, [576, 187])  # 187: two ranks cannot have equally many
    sampler = DistributedSampler[object](train)  # rank r takes samples r, r + ranks, ...
    loader = DataLoader(train, BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    test_loader = DataLoader(test, BATCH_SIZE, sampler=range(dist.get_rank(), len(test), dist.get_world_size()))
    model = nn.Linear(32, 10).to(DEVICE)
    ddp_model = nn.parallel.DistributedDataParallel(model)  # sends rank 0's weights to all
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    epoch = 0
    while epoch < EPOCHS:
        sampler.set_epoch(epoch)  # another order in each epoch, the same on all ranks
        model.train()
        for inputs, labels in loader:
            for part in range(MICRO_STEPS):
                with contextlib.nullcontext() if part == MICRO_STEPS - 1 else ddp_model.no_sync():  # the last averages
                    loss = cross_entropy(ddp_model(inputs[part::MICRO_STEPS]), labels[part::MICRO_STEPS])
                    (loss / MICRO_STEPS).backward()  # the gradients' sum is that of the global batch's mean
            optimizer.step()
            optimizer.zero_grad()
        epoch += 1
        model.eval()
        sums = torch.zeros(2, device=DEVICE)  # of the test samples: their losses, and how many are right
        with torch.no_grad():
            for inputs, labels in test_loader:
                logits = model(inputs)
                loss = cross_entropy(logits, labels, reduction="sum")
                sums += torch.stack([loss, (logits.argmax(1) == labels).sum()])
        dist.all_reduce(sums)  # sums, not means: the ranks have different numbers of samples
        mean_loss, accuracy = sums / len(test)
        if dist.get_rank() == 0:  # all have the same numbers
            print(f"epoch {epoch}: test loss {mean_loss:.5f}, accuracy {accuracy:.2%}")


if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())  # each rank its own GPU, before anything uses one
    dist.init_process_group()  # NCCL for GPUs, else gloo; torchrun tells each process its rank in the environment
    main()
    dist.destroy_process_group()
