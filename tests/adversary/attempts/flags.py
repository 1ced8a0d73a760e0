"""Flags with values that make no sense, alone or together. Nothing may be written, and nothing heavy done.

One value of each kind that the parser itself refuses is here; tests/common/test_cli.py has the others, and
tests/ddp/test_config.py the flags of the trainer that contradict each other.
"""

from __future__ import annotations

import re

from tests.adversary.attempt import Attempt
from tests.adversary.scenes import BEFORE_A_RUN, EVALUATE, RUN

# Flags after a command, and a part of the one line that must come out: these flags themselves, where there is no other.
WRONG: dict[str, list[str | tuple[str, str]]] = {
    RUN: [
        ("--lr nan", r"--lr nan is out of range: it must be finite and above 0"),
        ("--epochs 1.5", r"--epochs: invalid int value: '1\.5'"),
        ("--batch-size 500", r"--batch-size 500 .*144 training samples"),
        ("--train-samples 99999999", r"--train-samples 99999999 .*12,000"),
        ("--interface eth77", r"--interface eth77 is not an interface of "),
        ("--precision fp64", r"--precision: invalid choice: 'fp64'"),
        "--model nowhere:build",
        "--model json:dumps",
        ("--model os:sep", r"--model os:sep is a str and cannot be called"),
        ("--model :", r"--model"),
        "--dataset nowhere:load",
        "--dataset time:time",
        ("--dataset lfw --data-dir {here}/nowhere", r"nowhere"),
        ("--dataset fashion-mnist --data-dir {here}", r"train-images-idx3-ubyte"),
        ("--data-dir=", r"--data-dir: the value is empty: give one, or leave the flag out"),
        ("--data-dir {here}", r"--data-dir"),
        "--device cuda",
        ("--backend nccl", r"--backend nccl needs CUDA"),
        "--threads 100000000",
        ("--timeout 1e300", r"--timeout 1e\+300"),
        ("--run-dir /proc/run", r"--run-dir /proc/run .*cannot be written"),
        "--run-dir /dev/null",
        "--run-dir /dev/full",
        ("--run-dir {here}/" + 300 * "x", r"File name too long"),
        ("--resume", r"--resume: \S+/run holds no run; start it without --resume"),
        ("--resume --overwrite", r"--resume continues .* --overwrite deletes it: give one of them"),
        ("--auto-resume --overwrite", r"--auto-resume"),
        "--checkpoint-every 0",
        "--checkpoint-every never",
        "--checkpoint-every 1e9min",
        ("--dataset lfw --image-size 1000000", r"--image-size 1000000"),
        ("--dataset lfw --data-dir {faces} --min-images-per-person 7", r"--min-images-per-person 7"),
        "--bach-size 3",
        ("stray", r"unrecognized arguments: stray"),
        ("--epochs", r"--epochs: expected one argument"),
    ],
    EVALUATE: [
        ("--checkpoint none", r"--checkpoint none: there is only epoch-0001-step-00000003"),
        "--checkpoint ../../..",
        ("--checkpoint=", r"--checkpoint: the value is empty"),
        ("--run-dir {here}", r"--run-dir \S+ holds no run"),
        ("--run-dir {here}/nowhere", r"--run-dir \S+nowhere holds no run"),
        ("--run-dir /dev/null", r"/dev/null/checkpoints cannot be read \(Not a directory\)"),
        "--test-samples 99999999",
        "--device cuda",
        ("--backend nccl", r"--backend nccl needs CUDA"),
        ("--data-dir {here}", r"--data-dir"),
    ],
    "ddp.checkpoint": [
        "delete",
        ("inspect --run-dir {here}", r"holds no run|no checkpoint"),
        ("inspect --run-dir {here}/nowhere", r"nowhere"),
        ("export --run-dir {here} --output {here}/w.pt", r"holds no run|no checkpoint"),
        ("export --run-dir {run} --output {here}", r"--output"),
        ("export --run-dir {run} --output {here}/no/such/folder/w.pt", r"--output"),
        ("export --run-dir {run} --checkpoint none --output {here}/w.pt", r"--checkpoint none"),
    ],
    "ddp.bench": [
        ("speed", r"unknown benchmark 'speed': there is overhead"),
        ("allreduce --ranks 1", r"--ranks"),
        ("allreduce --output /dev/null", r"--output /dev/null"),
        ("scaling --device cuda", r"--device"),
        ("strategies", r"strategies is part of scaling now: python -m ddp\.bench scaling"),
        ("engines --models vgg", r"--models: invalid choice: 'vgg'"),
        ("engines --device cuda", r"--device cuda, but no CUDA device"),
        ("allreduce --device cuda", r"--device cuda, but no CUDA device"),
        ("overhead --image-size 30", r"--image-size 30 is no multiple of 28, the size of a glyph: use 28"),
    ],
    "dataparallel.train --train-samples 144 --test-samples 16 --run-dir {here}/run": [
        "--devices gpu",
        ("--devices=", r"--devices: the value is empty"),
        "--devices cpu,",
        "--devices cuda:0",
        ("--wrapper ddp", r"--wrapper: invalid choice: 'ddp'"),
        ("--batch-size 500", r"--batch-size 500 is more than the 144 training samples"),
        "--model nowhere:build",
    ],
    "dataparallel.bench --output {here}/bench": [
        "--batch-sizes 0",
        ("--batch-sizes 1,1", r"--batch-sizes: 1,1 names a value twice"),
        "--devices mars",
    ],
    "dataloading.bench --output {here}/bench": [
        "--workers -1",
        "--workers many",
        ("--workers=", r"--workers: the value is empty"),
        "--batch-size 0",
        ("--loader slow", r"--loader: invalid choice: 'slow'"),
        ("--decoder guess", r"--decoder: invalid choice: 'guess'"),
        ("--augmentation all", r"--augmentation: invalid choice: 'all'"),
        "--prefetch-factor 0",
        "--latency-ms -1",
        "--latency-ms nan",
        "--fetch-threads 0",
        "--pin-memory yes",
        ("--path-to-folder {here}", r"/here holds no JPEG file, nor do the folders in it"),
        ("--path-to-folder {here}/nowhere", r"/nowhere is not there: give a folder of JPEGs"),
        ("--path-to-folder=", r"--path-to-folder: the value is empty"),
        ("--path-to-folder /dev/null", r"/dev/null is a file, not a folder of JPEGs"),
        ("--path-to-folder http://127.0.0.1:1/faces", r"is a URL: mount it as a folder"),
        "--repeats 0",
        "--batches 0",
        "--image-size 0",
        ("--output /dev/null --workers 0", r"--output /dev/null"),
    ],
    "dataloading.lfw_dataset --path-to-folder {faces} --output {here}/out": [
        "--num-workers -1",
        "--batch-size 0",
        "--batches-to-check 0",
        "--image-size -3",
        ("--visualize-batch --output /dev/null", r"--output /dev/null"),
        ("-path_to_folder {here}", r"/here holds no JPEG file"),
    ],
    "dataloading.ladder --output {here}/out": [
        "--batch-size 0",
        ("--augmentation all", r"--augmentation: invalid choice"),
        ("--path-to-folder {here}", r"/here holds no JPEG file"),
    ],
}  # fmt: skip

ATTEMPTS = [
    Attempt(f"{command} {flags}", line, writes=BEFORE_A_RUN)
    for command, attempts in WRONG.items()
    for flags, line in (wrong if isinstance(wrong, tuple) else (wrong, re.escape(wrong)) for wrong in attempts)
]
