"""``python -m ddp.bench engines``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddp.bench.costs import PARTIAL, PARTS, WHOLE
from ddp.bench.engines import Config
from ddp.bench.variants import (
    DDP_VARIANTS,
    DEEP,
    FLOOR,
    HOOKED,
    PLAIN,
    SHARED,
    VIEWS,
    DDPVariant,
    build_network,
)
from ddp.rendezvous.process_group import process_group
from tests.support.fake_gpu import pretend_gpus
from tests.support.launch import run_command, run_ranks

STEPS = 2  # buckets are rebuilt after the first
SMALL = ("--rounds", "2", "--turn", "0.01", "--models", DEEP)


@pytest.mark.examples
def test_every_variant_is_measured(tmp_path: Path) -> None:
    """The bench measures every variant and writes its JSON and figure.

    Claim (ddp/README.md): the benches run and write their figures.
    """
    done = run_command("ddp.bench", "engines", *SMALL, "--builds", "1", "--output", str(tmp_path), timeout_s=280)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks on ")
    assert lines[1] == "deep-mlp, 404 parameters of 0.2 MB together, 72 samples per rank"
    measured = [*DDP_VARIANTS, *PARTIAL]
    assert [line[2:].split("  ")[0] for line in lines[3 : 3 + len(measured)]] == measured
    assert [line[:34].strip() for line in lines[-7:-1]] == [*PARTS, WHOLE]
    assert lines[-1] == f"results in {tmp_path}: engines.json, engines.png, climb.png, costs.png"

    written = json.loads((tmp_path / "engines.json").read_text())
    (model,) = written["models"]
    assert model["reference"] in (PLAIN, VIEWS)
    for times in (model["seconds"], model["processor_seconds"]):
        assert {name: len(seconds) for name, seconds in times.items()} == dict.fromkeys(measured, 2)
    for name in ("engines", "climb", "costs"):
        assert (tmp_path / f"{name}.png").is_file()


@pytest.mark.examples
def test_all_variants_average_the_same_gradients() -> None:
    one, other = run_ranks(_gradients, 2, DDP_VARIANTS)
    expected = one[PLAIN]
    for name in DDP_VARIANTS:
        if name == FLOOR:
            assert not all(torch.equal(a, b) for a, b in zip(one[name], other[name], strict=True))
            continue
        for mine, theirs, average in zip(one[name], other[name], expected, strict=True):
            assert torch.equal(mine, theirs), name
            torch.testing.assert_close(mine, average, rtol=1e-5, atol=1e-5 * float(average.abs().max()))


def _gradients(variants: dict[str, DDPVariant]) -> dict[str, list[Tensor]]:
    """For each variant, the contents of ``.grad`` after some steps."""
    with process_group("cpu", threads=1) as env:
        generator = torch.Generator().manual_seed(env.rank)
        images = torch.randn(4, 1, 28, 28, generator=generator)
        labels = torch.randint(10, (4,), generator=generator)
        gradients = {}
        for name, variant in variants.items():
            network = build_network("fashion-cnn")
            model = variant.wrap(network)
            for _ in range(STEPS):
                network.zero_grad(set_to_none=True)
                F.cross_entropy(model(images), labels).backward()
            gradients[name] = [
                parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None
            ]
        return gradients


@pytest.mark.parametrize(("gpus", "large", "ranks"), [(0, False, 2), (1, True, 1), (4, True, 4)])
def test_all_models_are_compared_by_default_but_large_ones_on_gpus_alone(
    monkeypatch: pytest.MonkeyPatch, gpus: int, large: bool, ranks: int
) -> None:
    pretend_gpus(monkeypatch, gpus)
    config = Config()
    assert config.models == ("fashion-cnn", "mlp", "resnet18", *["resnet50"] * large, DEEP)
    assert (config.ranks, config.device) == (ranks, "cuda" if gpus else "cpu")
    assert Config(models=(DEEP,), device="cpu").models == (DEEP,)


@pytest.mark.gpu
def test_one_rank_on_a_gpu_over_nccl(tmp_path: Path) -> None:
    """One rank on a GPU is measured over NCCL, without shared memory."""
    arguments = (*SMALL, "--builds", "1", "--ranks", "1", "--output", str(tmp_path))
    done = run_command("ddp.bench", "engines", *arguments, timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 rank on 1 GPU, nccl; ")
    written = json.loads((tmp_path / "engines.json").read_text())
    assert not {SHARED, HOOKED} & written["models"][0]["seconds"].keys()
