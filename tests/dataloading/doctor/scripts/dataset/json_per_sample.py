"""Images with labels in one JSON file, which is read anew for each image."""

import json
from pathlib import Path

from engine import train
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import pil_to_tensor


class Labelled(Dataset):
    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*/*.jpg"))[:1200]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        with open("labels.json") as file:
            labels = json.load(file)  # <- planted
        image = Image.open(self.files[index]).convert("RGB").resize((32, 32))
        return pil_to_tensor(image), labels[self.files[index].name]["label"]


loader = DataLoader(Labelled("small"), batch_size=16, shuffle=True, num_workers=2)
train(loader)
