"""The job of the table with the Trainer of transformers, as its documentation has each part.

torchrun --nproc_per_node=2 with_transformers.py FOLDER --batch-size 12 --micro-steps 2
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from ddp.audit.libraries.job import arguments, data_sets, network

args = arguments()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network(args.dropout)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows(samples: TensorDataset) -> list[dict[str, Tensor]]:
    return [{"inputs": inputs, "labels": label} for inputs, label in zip(*samples.tensors, strict=True)]


def metrics(prediction: EvalPrediction) -> dict[str, Any]:
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean()}


set_seed(0)
train, test = data_sets()
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
trainer = Trainer(model, settings, train_dataset=rows(train), eval_dataset=rows(test), compute_metrics=metrics)
trainer.train(resume_from_checkpoint=get_last_checkpoint(args.folder))
