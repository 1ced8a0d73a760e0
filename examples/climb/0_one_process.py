"""Train a linear model in one process, on its GPU if there is one. Each of the next files changes a few lines.
python examples/climb/0_one_process.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, random_split

EPOCHS, BATCH_SIZE = 4, 48  # samples of an optimizer step
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    torch.manual_seed(0)  # the same data and initial weights in every run
    labels = torch.randint(10, (763,))
    inputs = torch.randn(10, 32)[labels] + 1.5 * torch.randn(763, 32)  # ten clusters that overlap
    data = TensorDataset(inputs.to(DEVICE), labels.to(DEVICE))  # larger data moves to the GPU batch by batch
    train, test = random_split(data, [576, 187])  # 187: two ranks cannot have equally many
    sampler = RandomSampler(train, generator=torch.Generator())
    loader = DataLoader(train, BATCH_SIZE, sampler=sampler)
    test_loader = DataLoader(test, BATCH_SIZE)
    model = nn.Linear(32, 10).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    epoch = 0
    while epoch < EPOCHS:
        sampler.generator.manual_seed(epoch)  # each epoch's order follows from its number
        model.train()
        for inputs, labels in loader:
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
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
        mean_loss, accuracy = sums / len(test)
        print(f"epoch {epoch}: test loss {mean_loss:.5f}, accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
