"""Each worker keeps all images that it has ever decoded."""

from pathlib import Path

from engine import train
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import pil_to_tensor


class Cached(Dataset):
    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*/*.jpg"))
        self.cache = {}

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = pil_to_tensor(Image.open(self.files[index]).convert("RGB"))  # <- planted
        return self.cache[index][:, ::4, ::4], index % 10


loader = DataLoader(Cached("small"), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)
train(loader, epochs=2)
