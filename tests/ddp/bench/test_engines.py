"""``python -m ddp.bench engines``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.distributed.process_group import process_group
from ddp.bench import __main__ as bench
from ddp.bench.engines import EnginesConfig, Measured, verdict
from ddp.bench.variants import BY_HAND, DEEP, ENGINES, FLOOR, PLAIN, SHARED, VIEWS, Engine, build_network, variations
from tests.launch import run_command, run_ranks
from tests.user_errors import UserError

STEPS = 4  # PowerSGD begins with the third
SMALL = ("--builds", "1", "--rounds", "2", "--turn", "0.01", "--models", DEEP)


def test_every_engine_is_measured(tmp_path: Path) -> None:
    done = run_command("ddp.bench", "engines", *SMALL, "--model", DEEP, "--output", str(tmp_path), timeout_s=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "deep-mlp, 404 parameters of 0.2 MB together, 72 samples per rank"
    assert [line[2:34].strip() for line in lines[3 : 3 + len(ENGINES)]] == list(ENGINES)
    for name in (BY_HAND, SHARED):
        assert any(line.startswith(f"{DEEP}: {name} takes ") for line in lines)
    for subject, engines in variations().items():
        first = lines.index(subject) + 2
        assert [line[2:34].strip() for line in lines[first : first + len(engines)]] == list(engines)
    assert lines[-1] == f"results in {tmp_path}: engines.json, engines.png, variations.png"

    written = json.loads((tmp_path / "engines.json").read_text())
    (model,) = written["models"]
    assert model["reference"] in (PLAIN, VIEWS)
    for times in (model["seconds"], model["processor_seconds"]):
        assert {name: len(seconds) for name, seconds in times.items()} == dict.fromkeys(ENGINES, 2)
    assert [one["title"] for one in written["variations"]] == ["bucket size", "overlap", "hooks", "all-reduce"]
    assert (tmp_path / "engines.png").is_file() and (tmp_path / "variations.png").is_file()


def test_without_variations_and_in_two_builds(tmp_path: Path) -> None:
    done = run_command(
        "ddp.bench", "engines", *SMALL, "--builds", "2", "--no-variations", "--no-keep-memory",
        "--output", str(tmp_path), timeout_s=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks on ")
    written = json.loads((tmp_path / "engines.json").read_text())
    assert all(len(seconds) == 4 for seconds in written["models"][0]["seconds"].values())
    assert written["variations"] == []
    assert not (tmp_path / "variations.png").exists()


def test_what_is_compared_averages_the_same_gradients() -> None:
    engines = dict(ENGINES)
    for told in variations().values():
        engines |= told
    one, other = run_ranks(_gradients, 2, engines)
    expected = one[PLAIN]
    for name in engines:
        if name == FLOOR:
            assert not all(torch.equal(a, b) for a, b in zip(one[name], other[name], strict=True))
            continue
        for mine, theirs, average in zip(one[name], other[name], expected, strict=True):
            assert torch.equal(mine, theirs), name
            if "PowerSGD" not in name:
                tolerance = 0.05 if "bf16" in name else 1e-5
                torch.testing.assert_close(mine, average, rtol=tolerance, atol=tolerance * float(average.abs().max()))


def _gradients(engines: dict[str, Engine]) -> dict[str, list[Tensor]]:
    """With each engine, what is left in ``.grad`` after some steps."""
    with process_group("cpu", threads=1) as env:
        generator = torch.Generator().manual_seed(env.rank)
        images = torch.randn(4, 1, 28, 28, generator=generator)
        labels = torch.randint(10, (4,), generator=generator)
        found = {}
        for name, engine in engines.items():
            network = build_network("fashion-cnn")
            model, close = engine.wrap(network)
            for _ in range(STEPS):
                network.zero_grad(set_to_none=True)
                F.cross_entropy(model(images), labels).backward()
            found[name] = [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]
            close()
        return found


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ([0.5, 0.6, 0.7], "takes 0.600 [0.550 to 0.650] of the time of torch DDP, views: faster"),
        ([1.2, 1.3, 1.1], "takes 1.200 [1.150 to 1.250] of the time of torch DDP, views: slower"),
        ([0.7, 0.8, 1.3], "takes 0.800 [0.750 to 1.050] of the time of torch DDP, views: as fast, within the noise"),
        ([1.0, 1.0, 1.0], "takes 1.000 [1.000 to 1.000] of the time of torch DDP, views: as fast, within the noise"),
    ],
)
def test_a_verdict_says_no_more_than_the_rounds_do(seconds: list[float], words: str) -> None:
    measured = Measured("mlp", {VIEWS: [1.0, 1.0, 1.0], BY_HAND: seconds}, {}, VIEWS)
    assert verdict(measured, BY_HAND) == f"mlp: {BY_HAND} {words}"


def test_powersgd_has_one_bucket() -> None:
    told = variations()["hooks"]
    assert all(engine.bucket_mib == 10**6 for engine in told.values() if engine.hook == "PowerSGD")


def test_all_models_are_compared_by_default() -> None:
    assert EnginesConfig().models == ("fashion-cnn", "mlp", "resnet18", DEEP)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "1"), "--ranks 1 is out of range"),
        (("--models", "mlp,transformer"), "invalid choice: 'transformer'"),
        (("--models", "mlp,mlp"), "names a value twice"),
        (("--model", "transformer"), "invalid choice: 'transformer'"),
        (("--rounds", "1"), "--rounds 1"),
        (("--turn", "0"), "--turn 0.0 is out of range"),
        (("--output", __file__), "is a file: give a folder"),
    ],
)
def test_a_mistake_is_one_line(user_error: UserError, arguments: tuple[str, ...], words: str) -> None:
    assert words in user_error(bench.main, "engines", *arguments)


def test_it_is_refused_under_torchrun(user_error: UserError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "ddp.bench engines is started once, and not by torchrun" in user_error(bench.main, "engines")
