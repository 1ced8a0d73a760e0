"""Small images, two workers, and a network that takes much longer than they do."""

from engine import train
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

data = ImageFolder("small", transforms.Compose([transforms.Resize((64, 64)), transforms.PILToTensor()]))
model = nn.Sequential(
    *(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.ReLU(), nn.Conv2d(128, 64, 3)),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
)
loader = DataLoader(Subset(data, range(480)), batch_size=16, num_workers=2, persistent_workers=True)
train(loader, model=model)
