"""Images in a database, whose connection is opened before the workers start."""

import io
import sqlite3

from engine import train
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import pil_to_tensor


class Tiles(Dataset):
    def __init__(self, path):
        self.db = sqlite3.connect(path)  # <- planted

    def __len__(self):
        return self.db.execute("SELECT count(*) FROM tiles").fetchone()[0]

    def __getitem__(self, index):
        data, label = self.db.execute("SELECT data, label FROM tiles WHERE id = ?", (index,)).fetchone()
        image = Image.open(io.BytesIO(data)).convert("RGB").resize((64, 64))
        return pil_to_tensor(image), label


loader = DataLoader(Tiles("tiles.db"), batch_size=32, shuffle=True, num_workers=2)
train(loader)
