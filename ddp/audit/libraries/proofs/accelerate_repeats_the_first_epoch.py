"""After a resume, Accelerate gives epoch 1 the order of epoch 0: `load_state` does not restore the number of the epoch.

python accelerate_repeats_the_first_epoch.py

It prints the orders of both epochs, and then that of epoch 1 in a run that continues after epoch 0. On two ranks the same happens with the
default sampler. See huggingface/accelerate#3996.
"""

import sys
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset


def orders(folder: str, first_epoch: int) -> list[list[int]]:
    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8)), batch_size=4, shuffle=True))
    if first_epoch:
        accelerator.load_state(folder)
    found = []
    for epoch in range(first_epoch, 2):
        found.append(torch.cat([batch for (batch,) in loader]).tolist())
        if epoch == 0:
            accelerator.save_state(folder)
    return found


with tempfile.TemporaryDirectory() as folder:
    first, second = orders(folder, 0)
    (resumed,) = orders(folder, 1)
print(first, second, resumed, sep="\n")
sys.exit(resumed != second)
