"""Images are blurred by torch in the workers, to whom somebody has given eight threads each."""

import torch
from engine import train
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


def init_worker(worker):
    torch.set_num_threads(8)  # <- planted


class Blurred(Dataset):
    def __len__(self):
        return 800

    def __getitem__(self, index):
        image = torch.arange(3 * 256 * 256).remainder(index + 7).float().view(1, 3, 256, 256)
        for _ in range(4):
            image = functional.avg_pool2d(image, 5, 1, 2)
        return functional.adaptive_avg_pool2d(image, 8)[0], index % 10


loader = DataLoader(Blurred(), 16, num_workers=2, worker_init_fn=init_worker)
train(loader)
