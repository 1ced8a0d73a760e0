"""The models: a small one that learns, a wide one whose gradients are heavy, and one that everybody knows.

All take float images ``[n, channels, height, width]`` and return logits ``[n, classes]``.
"""

from __future__ import annotations

from torch import Tensor, nn

MODELS = ("fashion-cnn", "mlp", "resnet18")
# Samples of a forward pass in training, where it takes more than one: resnet18's last feature maps are of one pixel for images
# of up to 32x32, and BatchNorm finds no variance in a single value.
LEAST_SAMPLES = {"resnet18": 2}


class FashionCNN(nn.Module):
    """Two conv-BN-ReLU-pool blocks of 32 and 64 channels, then 600, 120 and ``classes`` units; 1.5 M parameters at 28x28.

    :param dropout: probability, after the first fully connected layer; 0 makes the model deterministic
    """

    def __init__(self, channels: int, height: int, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=3),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        remaining = [(side // 2 - 2) // 2 for side in (height, width)]
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * remaining[0] * remaining[1], 600),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(600, 120),
            nn.ReLU(),
            nn.Linear(120, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


class MLP(nn.Sequential):
    """Fully connected layers of ``width`` units. Its gradients are large against its compute, so that synchronizing them
    is what a step is spent on: 14.2 M parameters (57 MB in fp32) at 28x28, two flops per parameter and sample forward."""

    def __init__(self, inputs: int, classes: int, dropout: float, width: int = 2048, depth: int = 4) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for i in range(depth):
            layers += [nn.Linear(inputs if i == 0 else width, width), nn.ReLU()]
        super().__init__(*layers, nn.Dropout(dropout), nn.Linear(width, classes))


def build_model(name: str, shape: tuple[int, int, int], classes: int, dropout: float = 0.0) -> nn.Module:
    """The model ``name`` of :data:`MODELS` for images of ``shape`` (channels, height, width), in fp32 on the CPU.

    :param dropout: of ``fashion-cnn`` and ``mlp``; ``resnet18`` has none
    """
    channels, height, width = shape
    if name == "fashion-cnn":
        return FashionCNN(channels, height, width, classes, dropout)
    if name == "mlp":
        return MLP(channels * height * width, classes, dropout)
    if name == "resnet18":
        from torchvision.models import resnet18  # takes a second to import

        model: nn.Module = resnet18(num_classes=classes)
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        return model
    raise ValueError(f"unknown model {name!r}; there are {', '.join(MODELS)}")
