"""The job of the table with the Trainer of transformers, as its documentation has each part.

torchrun --nproc_per_node=2 with_transformers.py FOLDER --batch-size 12 --micro-steps 2
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--batch-size", type=int, default=12)  # of a rank and micro-step
parser.add_argument("--micro-steps", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.1)
args = parser.parse_args()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(32, 2))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, inputs: Tensor) -> None:
        self.inputs, self.labels = inputs, (inputs.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


def metrics(prediction: EvalPrediction) -> dict[str, Any]:
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean()}


set_seed(0)
inputs = torch.randn(176, 8)
settings = TrainingArguments(
    args.folder,
    use_cpu=True,
    bf16=True,
    per_device_train_batch_size=args.batch_size,
    gradient_accumulation_steps=args.micro_steps,
    num_train_epochs=3,
    learning_rate=0.1,
    max_grad_norm=1.0,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to="none",
    disable_tqdm=True,
    seed=0,
)
model = Classifier()
trainer = Trainer(
    model, settings, train_dataset=Samples(inputs[:144]), eval_dataset=Samples(inputs[144:]), compute_metrics=metrics
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(args.folder))
