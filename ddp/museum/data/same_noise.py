"""All ranks draw the same noise and the same time steps, because each rank seeds its generator alike

Seen in the training of a robot's model in 2026; the first thread is still open. The second explains why another project
gives each rank a seed of its own.

One seed lets all ranks build the same model. After that their generators stay equal: W ranks draw what one would draw.

- Robbyant/lingbot-vla-v2#41
- facebookresearch/deit#150
"""

import torch
import torch.nn.functional as F

from ddp.museum.exhibit import BROKEN, ddp_and_sgd, finish, gathered, loader, start

rank, ranks = start()
batches = loader()
model, optimizer = ddp_and_sgd(outputs=8)
torch.manual_seed(1 if BROKEN else 1 + rank)  # The model is built; only noise is drawn from here on.
drawn = set()
for clean, _ in batches:
    time, noise = torch.rand(len(clean), 1), torch.randn_like(clean)  # audit: same-noise
    F.mse_loss(model(clean + time * noise), noise).backward()
    optimizer.step()
    optimizer.zero_grad()
    drawn.add(time[0].item())
finish("distinct draws, of 20 by two ranks", len(set(gathered(drawn))))
