"""Photos of two megapixels, decoded in full for thumbnails of 64 pixels."""

from pathlib import Path

from engine import train
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms


class Photos(Dataset):
    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*/*.jpg"))
        self.transform = transforms.Compose([transforms.Resize((64, 64)), transforms.PILToTensor()])

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(self.files[index]).convert("RGB")  # <- planted
        return self.transform(image), index % 10


loader = DataLoader(Photos("photos"), batch_size=16, shuffle=True, num_workers=2)
train(loader)
