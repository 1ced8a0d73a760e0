"""Three steps of one process with two threads, each as a device of its own."""

import torch
import torch.nn.functional as F

from dataparallel.parallel import HandwrittenDataParallel

torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
model = HandwrittenDataParallel(network, ["cpu", "cpu"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    inputs = torch.randn(512, 512)
    loss = F.mse_loss(model(inputs), inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
