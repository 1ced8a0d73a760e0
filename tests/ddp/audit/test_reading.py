"""Hints from the text of a script: what is read in it, and what is right and looks like it."""

from __future__ import annotations

import pytest

from ddp.audit.detectors.reading import read

EVALUATES = """
loader = DataLoader(validation, 8, sampler=range(rank, 99, ranks))
def evaluate():
    return sum(model(batch).sum() for batch in loader)
def evaluate_all():
    dist.all_reduce(total := evaluate())
    return total
"""
WRONG = {
    "state-of-one-rank": "if rank == 0:  #\n    if epoch:\n        scheduler.step(loss)",
    "sampler-of-another-rank": """
rank = int(os.environ["LOCAL_RANK"])
sampler = DistributedSampler(data, rank=rank, num_replicas=8)  #
""",
    "hash-of-strings": "def place(word):\n    return hash(word) % 64  #",
    "unseeded-shuffle": "random.shuffle(files)  #\nfiles = files[rank::ranks]",
    "schedule-of-all-ranks": """
sampler = DistributedSampler(data)
steps = epochs * (len(data) // batch_size)  #
schedule = CosineAnnealingLR(optimizer, steps)
""",
    "saved-by-its-own-value": EVALUATES
    + """
stats = evaluate()
accuracy = stats.item() / 99
dist.all_reduce(stats)
if accuracy > best:  #
    torch.save(model, "best.pt")
""",
}
RIGHT = (
    "if rank == 0:\n    scheduler.step(loss)\nelse:\n    scheduler.step(loss)",
    "if rank == 0:\n    scheduler.step(loss)\ndist.broadcast(rate, 0)",
    "if rank == 0:\n    bar.step()",
    "parser.add_argument('--rank', default=0)\nargs.rank = dist.get_rank()\nDistributedSampler(data, rank=args.rank)",
    "rank = int(os.environ['RANK'])\nDistributedSampler(data, rank=rank)",
    "init_process_group('gloo', rank=args.local_rank)\nDistributedSampler(data, rank=args.local_rank)",
    "port = 2**15 + hash(os.getuid()) % 2**14",
    "random.seed(0)\nrandom.shuffle(files)\nfiles = files[rank::ranks]",
    "DistributedSampler(data)\nsteps = len(data) // (batch_size * world)\nCosineAnnealingLR(optimizer, len(loader))",
    "DistributedSampler(data)\nsteps = len(data) // batch // world_size\nCosineAnnealingLR(optimizer, steps)",
    EVALUATES + "accuracy = evaluate_all()\nif accuracy > best:\n    torch.save(model, 'best.pt')",
    EVALUATES.replace("sampler", "batch_size")
    + "accuracy = evaluate()\nif accuracy > best:\n    torch.save(model, 'best.pt')",
)


@pytest.mark.parametrize("name", WRONG)
def test_a_hint_is_at_its_line(name: str) -> None:
    source = WRONG[name]
    line = next(n for n, text in enumerate(source.splitlines(), 1) if text.endswith("#"))
    assert list(read(source)) == [(name, line)]


@pytest.mark.parametrize("source", RIGHT)
def test_what_is_right_is_no_hint(source: str) -> None:
    assert list(read(source)) == []
