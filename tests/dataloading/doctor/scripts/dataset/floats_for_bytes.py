"""A folder of images, turned into floats one by one, as most tutorials do."""

from engine import train
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

to_floats = transforms.ToTensor()  # <- planted
data = ImageFolder("small", transforms.Compose([transforms.CenterCrop(256), to_floats]))
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2)
train(loader, model=nn.Sequential(nn.MaxPool2d(1, 32), nn.Flatten(), nn.Linear(192, 10)))
