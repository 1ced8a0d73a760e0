"""One line for a user error: flags of every command with values that make no sense, alone or together.

Nothing may be written, and nothing heavy done.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from pathlib import Path

import pytest

from tests.adversary.run import files_below
from tests.adversary.scenes import BEFORE_A_RUN, EVALUATE, RUN, finished_copy, photos
from tests.support.commands import main_of
from tests.support.user_errors import UserError

# Flags after a command, and a part of the one line that must come out: these flags themselves, where there is no other.
WRONG: dict[str, list[str | tuple[str, str]]] = {
    RUN: [
        ("--lr nan", r"--lr nan is out of range: it must be finite and above 0"),
        ("--batch-size 500", r"--batch-size 500 .*144 training samples"),
        ("--batch-size 100 --grad-accumulation-steps 3", r"--batch-size 100 .*1 ranks x 3 micro-steps.*use 99 or 102"),
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
        ("--dataset fashion-mnist --data-dir {here}", r"(?=.*train-images-idx3-ubyte).*--download"),
        ("--data-dir=", r"--data-dir: the value is empty: give one, or leave the flag out"),
        ("--data-dir {here}", r"--data-dir \S+/here is for fashion-mnist"),
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
        ("--bach-size 3", r"unrecognized arguments: --bach-size 3: did you mean --batch-size\?"),
    ],
    "ddp.train": [
        ("--seed many", r"--seed: invalid int value: 'many' \(python -m ddp\.train --help lists what there is\)$"),
        ("--lr fast", r"--lr: invalid float value: 'fast' \("),
        ("--lr 1e999", r"--lr inf is out of range: it must be finite and above 0$"),
        ("--dropout -0.1", r"--dropout -0\.1 is out of range: it must be at least 0 and below 1$"),
        ("--seed", r"--seed: expected one argument \("),
        ("--batch 3", r"unrecognized arguments: --batch 3: did you mean --batch-size\? \("),
        ("stray", r"unrecognized arguments: stray \("),
        ("--download", r"--download is for fashion-mnist"),
        ("--loader fast", r"--loader fast is for lfw and folder: glyphs"),
        ("--min-images-per-person 40", r"--min-images-per-person is for lfw: glyphs"),
        ("--image-size 64 --dataset fashion-mnist", r"--image-size is for lfw and folder and glyphs: fashion-mnist"),
        ("--image-size 100", r"--image-size 100 is no multiple of 28, the size of a glyph: use 112"),
        ("--decoder pillow --dataset folder --data-dir d", r"--decoder is for lfw: folder does not take it"),
        ("--dataset folder", r"--dataset folder needs --data-dir DIR"),
        ("--dataset own:load --loader fast", r"--loader fast is for lfw and folder: own:load has no files"),
        ("--warmup-epochs 4 --epochs 3", r"--warmup-epochs 4 is longer than --epochs 3"),
        ("--deterministic --cudnn-benchmark", r"--deterministic and --cudnn-benchmark contradict each other"),
        ("--bucket-mib 4 --strategy naive", r"--bucket-mib 4.0 is for --strategy torch and handwritten: naive"),
        ("--gradient-precision bf16 --strategy fsdp2", r"--gradient-precision bf16 is for --strategy torch and"),
        ("--compile reduce-overhead --grad-accumulation-steps 2",
         r"--compile reduce-overhead uses CUDA graphs.*--grad-accumulation-steps 1 instead of 2"),
        ("--model gpt --dataset glyphs", r"--model gpt does not learn --dataset glyphs: gpt learns sums"),
        ("--width 64", r"--width is for --model gpt, not for fashion-cnn"),
        ("--model gpt --width 100", r"--width 100 is no multiple of 64, the width of a head: use 64 or 128"),
        ("--strategy zero1 --compile", r"--compile is for replicas"),
        ("--strategy zero2 --async-checkpoint", r"--async-checkpoint is for replicas"),
        ("--strategy zero3 --check-replicas-every 5", r"--check-replicas-every is for replicas"),
        ("--strategy zero3 --all-reduce tree",
         r"--all-reduce tree has no reduce-scatter and all-gather for --strategy zero3: use backend"),
        ("--strategy fsdp2 --all-reduce ring", r"--all-reduce ring is for --strategy torch, .*: leave it out with fsdp2"),
        ("--strategy naive --all-reduce ring", r"leave it out with naive"),
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
        ("inspect --run-dir {here}/nowhere", r"--run-dir \S+/nowhere holds no run: "),
        ("export --run-dir {here}/nowhere --output {here}/w.pt", r"--run-dir \S+/nowhere holds no run: "),
        ("export --run-dir {run} --output {here}", r"--output"),
        ("export --run-dir {run} --output {here}/no/such/w.pt", r"--output \S+/such/w.pt cannot be written \(No such file"),
        ("export --run-dir {run} --checkpoint none --output {here}/w.pt", r"--checkpoint none: there is only epoch-0001"),
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
        ("allreduce --sizes 4,6", r"--sizes 6 is no multiple of the 4 bytes of a float32"),
        ("allreduce --sizes 4", r"--sizes 4: give two or more"),
        ("scaling --batch-size 145 --processes 1,2", r"--batch-size 145 does not divide"),
        ("scaling --device cuda --processes 1,64", r"usable"),
        ("memory --width 200", r"--width 200 is no multiple of 64, the width of a head: use 192 or 256"),
    ],
    "ddp.conformance": [
        ("ddp.by_hand:NoSuchWrapper", r"has no 'NoSuchWrapper'"),
        ("no_such_module:X", r"No module named 'no_such_module'"),
        ("tests.ddp.conformance.wrappers:NUMBER", r"cannot be called"),
        ("without_a_colon", r"name the wrapper as module:Class"),
        ("--only no_such_check", r"--only no_such_check: no check has that in its name"),
        ("--ranks 1", r"--ranks 1 is out of range"),
        ("--compare runs/torch", r"unrecognized arguments: --compare"),
    ],
    "dataparallel.train --train-samples 144 --test-samples 16 --run-dir {here}/run": [
        "--devices gpu",
        ("--devices=", r"--devices: the value is empty"),
        "--devices cpu,",
        "--devices cuda:0",
        ("--wrapper ddp", r"--wrapper: invalid choice: 'ddp'"),
        ("--batch-size 500", r"--batch-size 500 is more than the 144 training samples"),
        ("--batch-size 5 --devices cpu,cpu", r"--batch-size 5 does not divide over 2 devices: use a multiple of 2"),
        ("--batch-size 2 --devices cpu,cpu --model resnet18", r"resnet18 cannot normalize a single sample on a device"),
        ("--wrapper torch --devices cpu", r"--wrapper torch: nn.DataParallel knows no CPU devices: use --wrapper handwritten"),
        ("--dataset lfw", r"--dataset: invalid choice: 'lfw'"),
        "--model nowhere:build",
    ],
    "dataparallel.bench --output {here}/bench": [
        "--batch-sizes 0",
        ("--batch-sizes 1,1", r"--batch-sizes: 1,1 names a value twice"),
        ("--batch-sizes 1 --devices cpu,cpu", r"--batch-sizes 1 is too small for fashion-cnn on 2 devices"),
        ("--batch-sizes 2 --devices cpu,cpu --model resnet18", r"too small for resnet18 on 2 devices"),
        ("--devices cpu", r"--devices cpu is a single device"),
        "--devices mars",
    ],
    "dataloading.bench --output {here}/bench": [
        "--workers -1",
        ("--workers many", r"--workers: invalid int value: 'many'"),
        ("--workers=", r"--workers: invalid int value: ''"),
        "--batch-size 0",
        ("--loader slow", r"--loader: invalid choice: 'slow'"),
        ("--batch-size 8,0", r"--batch-size 0 is out of range"),
        ("--batch-size 8,8", r"names a value twice"),
        ("--workers 0,-2", r"--workers -2 is out of range"),
        ("--loader fast-processes", r"invalid choice: 'fast-processes' \(choose from stock, fast\)"),
        ("--start-method fork --image-size 64", r"--image-size has no meaning with --start-method"),
        ("--start-method fork --workers 1,2", r"--workers 1,2: --start-method takes one number"),
        ("--start-method fork --workers 0", r"--workers 0: --start-method takes one number"),
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
    "dataloading.doctor": [
        ("", r"which script\?"),
        ("nowhere.py", r"nowhere.py: there is no such script"),
        "--seconds 0",
        "--timeout 0",
        "--trials -1",
        ("--device mars", r"--device: invalid choice: 'mars'"),
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

# Values of flags of ddp.train that are just out of their range.
OUT_OF_RANGE = (
    "lr=0 momentum=1 weight-decay=-1 dropout=1 label-smoothing=1 clip-norm=0 epochs=0 batch-size=0 train-samples=0 "
    "test-samples=0 grad-accumulation-steps=0 warmup-epochs=-1 bucket-mib=0 threads=-1 timeout=0 workers=-1 keep-last=0 "
    "max-skipped-steps=-1 check-replicas-every=0 log-every=0 image-size=4 min-images-per-person=1"
)
EVERY = [
    (f"{command} {flags}", line)
    for command, wrong in WRONG.items()
    for flags, line in (one if isinstance(one, tuple) else (one, re.escape(one)) for one in wrong)
] + [
    (f"ddp.train --{flag}", f"^error: --{flag.partition('=')[0]} .* is out of range: it must be ")
    for flag in OUT_OF_RANGE.split()
]


@pytest.mark.parametrize(("typed", "line"), EVERY)
def test_a_mistake_is_one_line(
    user_error: UserError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, line: str
) -> None:
    """Bad input to a command is one line that names it, with exit status 2; no file is made or changed.

    Claim (README.md): bad input is one line, exit status 2.
    """
    here = tmp_path / "here"
    here.mkdir()
    names = {"here": str(here)}
    if "{run}" in typed:
        names["run"] = str(finished_copy(here))
    if "{faces}" in typed:
        names["faces"] = str(photos())
    before = files_below(here)
    monkeypatch.chdir(here)
    module, *arguments = (word.format(**names) for word in shlex.split(typed))
    assert re.search(line, user_error(main_of(module), *arguments))
    after = files_below(here)
    changed = [name for name in {*before, *after} if before.get(name) != after.get(name)]
    assert not [name for name in changed if not any(fnmatch.fnmatch(name, allowed) for allowed in BEFORE_A_RUN)]
