"""common/distributed/agreement.py: ranks that were started differently say so, all of them, and soon."""

from __future__ import annotations

import dataclasses
import datetime
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from common.command_line.cli import flag_of, parse, settings_of
from common.distributed import agreement
from common.distributed.agreement import GPU, GPU_KIND, UNKNOWN, Facts, describe, require_agreement
from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from ddp.config import TrainConfig
from ddp.rendezvous.launch_facts import launch_facts, source_digest
from ddp.rendezvous.process_group import process_group
from tests.support.launch import run_ranks

PATIENCE_S = 60.0


def meet(
    everyone: list[tuple[int, int, Facts]], timeout_s: float = PATIENCE_S, late_s: float = 0.0
) -> list[str | None]:
    """The answers to each rank of (rank, WORLD_SIZE, facts). Rank 0 serves the store, and the last one comes late."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(number: int) -> str | None:
        place, world_size, facts = everyone[number]
        store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=datetime.timedelta(seconds=PATIENCE_S))
        time.sleep(late_s * (number == len(everyone) - 1))
        try:
            require_agreement(store, place, world_size, facts, timeout_s)
        except UsageError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(everyone)) as threads:
        return list(threads.map(rank, range(len(everyone))))


def test_ranks_that_agree_go_on() -> None:
    assert meet([(rank, 3, {"--lr": "0.1"}) for rank in range(3)], late_s=0.3) == [None] * 3


def test_a_difference_names_the_flag_the_ranks_and_their_values_on_all_ranks() -> None:
    facts = [{"--lr": "0.1", "--seed": "0"}, {"--lr": "0.05", "--seed": "0"}, {"--lr": "0.1", "--seed": "0"}]
    told = meet([(rank, 3, own) for rank, own in enumerate(facts)], late_s=0.3)
    assert told == [told[0]] * 3
    assert told[0] is not None
    assert "--lr is 0.1 on ranks 0 and 2, but 0.05 on rank 1" in told[0]
    assert "--seed" not in told[0]


def test_all_say_it_although_a_rank_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "OTHERS_S", 0.3)
    told = meet([(0, 3, {"--lr": "0.1"}), (1, 3, {"--lr": "1"})])
    assert told[0] == told[1] is not None


def test_world_sizes_that_differ() -> None:
    """Ranks with different world sizes are all told which rank has which."""
    assert (
        meet([(0, 2, {}), (1, 3, {}), (2, 3, {})])
        == [
            "the ranks were started differently: WORLD_SIZE is 2 on rank 0, but 3 on ranks 1 and 2: "
            "give all the same flags, versions and environment"
        ]
        * 3
    )


def test_two_processes_with_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with the same rank are named to all ranks."""
    names = iter(["one", "two", "three"])
    monkeypatch.setattr("socket.gethostname", lambda: next(names))
    told = meet([(0, 3, {}), (1, 3, {}), (1, 3, {})])
    assert all(
        text and text.startswith("RANK=1 was given to two processes, process ")
        for text in (told[0], told[2] or told[1])
    )


def test_ranks_that_do_not_come_in_time_are_named() -> None:
    for present, words in ((0, r"ranks \[1, 2\] did not come"), (2, "rank 0 did not come")):
        with pytest.raises(dist.DistStoreError, match=words):
            meet([(present, 3, {})], 0.3)


def test_many_differences_and_many_ranks_are_still_one_line() -> None:
    everyone = {rank: {f"--flag-{i}": str(rank > 19) for i in range(9)} for rank in range(40)}
    told = describe(everyone)
    assert told is not None
    assert "--flag-0 is False on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more, but True on ranks 20, " in told
    assert "--flag-3" in told and "--flag-4" not in told and "and 5 more: give all" in told
    assert describe({0: {"a": "1"}, 1: {}}) is not None  # a fact that a rank lacks


def gpus(*places: str, kinds: str = "") -> list[tuple[int, int, Facts]]:
    """Ranks with GPUs."""
    world_size = len(places)
    return [
        (rank, world_size, {GPU: place, GPU_KIND: kinds[rank : rank + 1] or "A"}) for rank, place in enumerate(places)
    ]


def test_two_ranks_of_nccl_with_one_gpu_are_refused_on_all_ranks() -> None:
    """Two ranks of NCCL with one gpu are refused on all ranks.

    Claim (ddp/README.md, 1): a rank takes a GPU of those that it sees; two ranks of NCCL on one are refused, gloo's
    share it.
    """
    ranks = gpus("H100 GPU-1 of a", "H100 GPU-2 of a", "H100 GPU-1 of a", "H100 GPU-1 of b")
    assert (
        meet(ranks, late_s=0.2)
        == [
            "ranks 0 and 2 have the same GPU, H100 GPU-1 of a, and NCCL needs one for each: start with --nproc_per_node=2, show "
            "each rank its own by CUDA_VISIBLE_DEVICES, or let them share it with --device cuda --backend gloo"
        ]
        * 4
    )
    assert meet(gpus("GPU-1 of a", "GPU-2 of a", "GPU-1 of b")) == [None] * 3
    assert meet(gpus(UNKNOWN, UNKNOWN)) == [None] * 2  # of gloo


def test_gpus_of_different_kinds_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert meet(gpus("1", "2", "3", kinds="ABA")) == [None] * 3
    (line,) = caplog.messages
    assert line.startswith("GPUs of different kinds: A on ranks 0 and 2, B on rank 1: ")
    assert "with --clip-norm the ranks' weights may diverge in the last bit" in line
    caplog.clear()
    assert meet(gpus("1", "2")) == [None] * 2
    assert not caplog.messages


def test_a_rank_tells_its_gpu_if_no_other_may_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that each see one GPU call it cuda:0; its own name tells whether it is the same."""
    properties = SimpleNamespace(name="NVIDIA H100", uuid="5f6c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    env = DistEnv(1, 1, 2, 2, torch.device("cuda", 0), "nccl", "node7")
    facts = launch_facts(env, None)
    assert (facts[GPU], facts[GPU_KIND]) == ("NVIDIA H100 GPU-5f6c of node7", "NVIDIA H100")
    assert launch_facts(dataclasses.replace(env, backend="gloo"), None)[GPU] == UNKNOWN
    assert GPU not in launch_facts(DistEnv.alone(torch.device("cpu")), None)


def test_what_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All settings but paths and interfaces, software, and what changes arithmetic."""
    config = TrainConfig(run_dir=tmp_path)
    facts = launch_facts(DistEnv.alone(torch.device("cpu")), config)
    flags = {flag_of(field.name) for field in dataclasses.fields(config)}
    assert flags - facts.keys() == {"--run-dir", "--data-dir", "--interface"}
    assert facts["the version of torch"] == torch.__version__
    assert facts["the digest of this project's source"] == source_digest()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    others = launch_facts(DistEnv.alone(torch.device("cpu")), config)
    assert {name for name in facts if facts[name] != others[name]} == {"NVIDIA_TF32_OVERRIDE"}


# Two different values of each flag that needs others beside it, or has no value that can be drawn.
VALUES = {
    "--dataset": ("--dataset glyphs", "--dataset fashion-mnist"),
    "--min-images-per-person": (
        "--dataset lfw --min-images-per-person 20", "--dataset lfw --min-images-per-person 30"
    ),
    "--image-size": ("--dataset lfw --image-size 64", "--dataset lfw --image-size 96"),
    "--decoder": ("--dataset lfw --decoder pillow", "--dataset lfw --decoder simplejpeg"),
    "--width": ("--model gpt --width 64", "--model gpt --width 128"),
    "--layers": ("--model gpt --layers 2", "--model gpt --layers 3"),
    "--loader": ("--dataset lfw --loader stock", "--dataset lfw --loader fast"),
    "--all-reduce": ("--strategy handwritten --all-reduce ring", "--strategy handwritten --all-reduce tree"),
    "--resume": ("", "--resume"),
    "--auto-resume": ("", "--auto-resume"),
    "--overwrite": ("", "--overwrite"),
    "--device": ("--device cpu", "--device auto"),
    "--backend": ("--backend gloo", "--backend auto"),
    "--download": ("--dataset fashion-mnist", "--dataset fashion-mnist --download"),
    "--checkpoint-every": ("--checkpoint-every 7", "--checkpoint-every 8min"),
}  # fmt: skip


def two_values(flag: str, random_: random.Random) -> tuple[str, str]:
    """Arguments with two values of a flag."""
    if flag in VALUES:
        return VALUES[flag]
    field = next(field for field in dataclasses.fields(TrainConfig) if flag_of(field.name) == flag)
    if isinstance(field.default, bool):
        return flag, f"--no-{flag[2:]}" if field.default else ""
    values = field.metadata["choices"] or range(2, 300)
    if "float" in str(field.type):
        values = (0.01, 0.25, 0.5, 0.75, 0.125)
    one, other = random_.sample(list(values), 2)
    return f"{flag} {one}", f"{flag} {other}"


def differing_flags(seed: int, cases: int) -> list[tuple[str, list[list[str]]]]:
    """Jobs of two ranks: the flag that differs, and each rank's arguments."""
    random_ = random.Random(seed)
    flags = [name for name in settings_of(TrainConfig()) if name != "--warmup-epochs"]  # which other flags determine
    made: list[tuple[str, list[list[str]]]] = []
    while len(made) < cases:
        flag = random_.choice(flags)
        both = [arguments.split() for arguments in two_values(flag, random_)]
        other = random_.choice([one for one in ("--seed", "--lr", "--log-every", "--momentum") if one != flag])
        common = two_values(other, random_)[0].split()
        random_.shuffle(both)
        made.append((flag, [own + common for own in both]))
    return made


def told_of(cases: list[tuple[str, list[list[str]]]]) -> list[str]:
    """On each rank: what it is told in each job, and that it can join the next."""
    told = []
    for _, arguments in cases:
        config = parse(TrainConfig, "ddp.train", None, arguments[int(os.environ["RANK"])])
        try:
            with process_group("cpu", timeout_s=60, settings=config):
                told.append("nothing")
        except UsageError as error:
            told.append(str(error))
    return told


def check(seed: int, cases: int) -> None:
    jobs = differing_flags(seed, cases)
    first, second = run_ranks(told_of, 2, jobs, timeout_s=60 + cases)
    assert first == second
    for (flag, arguments), told in zip(jobs, first, strict=True):
        assert f" {flag} is " in told, (arguments, told)
        assert " on rank 0, but " in told and "\n" not in told


def test_whatever_flag_differs_it_is_named() -> None:
    """Ranks whose flags differ are refused with the name of the flag and both values.

    Claim (ddp/README.md, 1): ranks that were started differently are told so, whichever flag it is.
    """
    check(seed=0, cases=30)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_jobs_whose_flags_differ() -> None:
    """In a thousand jobs with random differences in their flags, each difference is named.

    Claim (ddp/README.md, 1): in a thousand jobs whose flags differ, the flag is named.
    """
    check(seed=1, cases=1000)
