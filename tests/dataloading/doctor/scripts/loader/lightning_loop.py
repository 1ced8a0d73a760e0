"""Lightning's loop, and a loader with all defaults."""

import lightning
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 96 * 96, 10))

    def training_step(self, batch, number):
        return functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
data = ImageFolder("small", transforms.Compose([transforms.Resize((96, 96)), transforms.ToTensor()]))
loader = DataLoader(data, batch_size=32, shuffle=True)  # <- planted
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(Classifier(), loader)
