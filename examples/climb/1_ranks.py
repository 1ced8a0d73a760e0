"""Ranks: each process has a replica of the model, and DDP averages their gradients while backward is running.
Still wrong: all ranks take the same samples, so two ranks do the work of one twice.
torchrun --nproc_per_node=2 examples/climb/1_ranks.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

EPOCHS, BATCH_SIZE = 4, 48  # samples of an optimizer step


def main() -> None:
    torch.manual_seed(0)  # the same data and initial weights in every run
    labels = torch.randint(10, (763,))
    inputs = torch.randn(10, 32)[labels] + 1.5 * torch.randn(763, 32)  # ten clusters that overlap
    train = TensorDataset(inputs[:576], labels[:576])
    test = TensorDataset(inputs[576:], labels[576:])  # 187 samples: two ranks cannot have equally many
    sampler = RandomSampler(train, generator=torch.Generator())
    loader = DataLoader(train, BATCH_SIZE, sampler=sampler)
    test_loader = DataLoader(test, BATCH_SIZE)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    ddp_model = DistributedDataParallel(model)  # sends rank 0's weights to all
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    epoch = 0
    while epoch < EPOCHS:
        sampler.generator.manual_seed(epoch)  # each epoch's order follows from its number
        model.train()
        for inputs, labels in loader:
            loss = F.cross_entropy(ddp_model(inputs), labels)  # not model: DDP prepares backward here
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        epoch += 1
        model.eval()
        sums = torch.zeros(2)  # of the test samples: their losses, and how many are right
        with torch.no_grad():
            for inputs, labels in test_loader:
                logits = model(inputs)
                loss = F.cross_entropy(logits, labels, reduction="sum")
                sums += torch.stack([loss, (logits.argmax(1) == labels).sum()])
        mean_loss, accuracy = (sums / len(test)).tolist()
        if dist.get_rank() == 0:  # all have the same numbers
            print(f"epoch {epoch}: test loss {mean_loss:.5f}, accuracy {accuracy:.2%}")


if __name__ == "__main__":
    dist.init_process_group("gloo")  # torchrun tells each process its rank through the environment
    main()
    dist.destroy_process_group()
