"""Accelerate's loop around images that are resized as floats, by torch, one by one."""

import torch
from accelerate import Accelerator
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Enlarged(Dataset):
    def __len__(self):
        return 1600

    def __getitem__(self, index):
        image = torch.arange(3 * 64 * 64).remainder(index + 5).float().view(1, 3, 64, 64)
        large = functional.interpolate(image, size=512, mode="bicubic")  # <- planted
        return large[0, :, ::64, ::64].flatten(), index % 10


accelerator, model = Accelerator(cpu=True), nn.Linear(192, 10)
loader = DataLoader(Enlarged(), batch_size=16, num_workers=2)
model, optimizer, loader = accelerator.prepare(model, optim.SGD(model.parameters(), lr=1e-3), loader)
for images, labels in loader:
    loss = functional.cross_entropy(model(images), labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.6f}")
