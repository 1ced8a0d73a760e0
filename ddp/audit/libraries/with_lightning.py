"""The job of the table with Lightning, as its documentation has each part.

torchrun --nproc_per_node=2 with_lightning.py FOLDER --batch-size 12 --micro-steps 2
"""

import os

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from ddp.audit.libraries.job import arguments, data_sets, network

args = arguments()


class Classifier(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.network = network(args.dropout)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        right = (self.network(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


seed_everything(0)
train, test = data_sets()
loader, test_loader = DataLoader(train, args.batch_size, shuffle=True), DataLoader(test, args.batch_size)
trainer = Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    precision="bf16-mixed",
    max_epochs=3,
    accumulate_grad_batches=args.micro_steps,
    gradient_clip_val=1.0,
    callbacks=[ModelCheckpoint(args.folder, save_last=True)],
    default_root_dir=args.folder,
    enable_progress_bar=False,
)
last = os.path.join(args.folder, "last.ckpt")
trainer.fit(Classifier(), loader, test_loader, ckpt_path=last if os.path.exists(last) else None)
