"""Images of a folder, decoded by the process that trains."""

from engine import train
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

data = ImageFolder("small", transforms.Compose([transforms.Resize((96, 96)), transforms.PILToTensor()]))
loader = DataLoader(data, batch_size=32, shuffle=True)  # <- planted
train(loader)
