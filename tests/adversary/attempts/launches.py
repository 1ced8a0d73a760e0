"""Jobs whose ranks disagree, and environments that no launcher would give."""

from __future__ import annotations

from tests.adversary.attempt import Attempt
from tests.adversary.scenes import BEFORE_A_RUN, EVALUATE, RUN

# Arguments of rank 0, of rank 1, and the fact that must be named. (tests/common/distributed/test_agreement.py has all flags.)
DIFFERENT: list[tuple[str, str, str]] = [
    ("", "--lr 0.05", "--lr is 0.1 on rank 0, but 0.05 on rank 1"),
    ("--resume", "", "--resume is True on rank 0, but False on rank 1"),
    ("--compile", "--compile max-autotune", "--compile is default on rank 0, but max-autotune on rank 1"),
]
# Environment of rank 1 alone.
ENVIRONMENTS: list[tuple[dict[str, str], str]] = [
    ({"WORLD_SIZE": "3"}, r"WORLD_SIZE is 2 on rank 0, but 3 on rank 1"),
    ({"NVIDIA_TF32_OVERRIDE": "0"}, r"NVIDIA_TF32_OVERRIDE is not set on rank 0, but 0 on rank 1"),
    ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, r"CUBLAS_WORKSPACE_CONFIG is not set on rank 0, but :4096:8 on rank 1"),
]
# Environment of one process that is started by hand; what it must say.
ALONE: list[tuple[dict[str, str], str]] = [
    ({"RANK": "abc"}, r"RANK='abc' is not a whole number of 0 or more"),
    ({"RANK": "2"}, r"RANK=2"),
    ({"RANK": "-1"}, r"RANK='-1' is not a whole number of 0 or more"),
    ({"RANK": ""}, r"RANK"),
    ({"WORLD_SIZE": "0"}, r"WORLD_SIZE=0"),
    ({"WORLD_SIZE": "two"}, r"WORLD_SIZE='two' is not a whole number of 0 or more"),
    ({"LOCAL_RANK": "x"}, r"LOCAL_RANK='x' is not a whole number of 0 or more"),
    ({"LOCAL_RANK": "5"}, r"LOCAL_RANK=5"),
    ({"LOCAL_WORLD_SIZE": "0"}, r"LOCAL_WORLD_SIZE=0"),
    ({"LOCAL_WORLD_SIZE": "99"}, r"LOCAL_WORLD_SIZE=99"),
    ({"MASTER_PORT": "99999"}, r"MASTER_PORT=99999"),
    ({"MASTER_PORT": "-1"}, r"MASTER_PORT='-1' is not a whole number of 0 or more"),
    ({"MASTER_PORT": "http"}, r"MASTER_PORT='http' is not a whole number of 0 or more"),
    ({"MASTER_ADDR": ""}, r"MASTER_ADDR"),
    ({"MASTER_ADDR": "no.such.host.invalid"}, r"no\.such\.host\.invalid"),
]
PLACE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"
}  # fmt: skip

ATTEMPTS = [
    *(
        Attempt(RUN, f"the ranks were started differently: (.*; )?{line}", ranks=(first, second))
        for first, second, line in DIFFERENT
    ),
    *(Attempt(RUN, line, ranks=("", ""), rank_env={1: env}) for env, line in ENVIRONMENTS),
    *(Attempt(f"{RUN} --timeout 5", line, env=PLACE | env, writes=BEFORE_A_RUN) for env, line in ALONE),
    # Half of torchrun's variables. (tests/ddp/rendezvous/test_process_group.py leaves out each of them.)
    Attempt(RUN, "RANK", env={key: value for key, value in PLACE.items() if key != "RANK"}),
    # The other commands compare too.
    Attempt(EVALUATE, "--precision is fp32 on rank 0, but bf16 on rank 1", ranks=("", "--precision bf16")),
    Attempt(EVALUATE, "--test-samples is 16 on rank 0, but 8 on rank 1", ranks=("", "--test-samples 8")),
    Attempt(EVALUATE, "--checkpoint is None on rank 0, but best on rank 1", ranks=("", "--checkpoint best")),
    Attempt("ddp.bench overhead", "--batch-size is 144 on rank 0, but 12 on rank 1", ranks=("", "--batch-size 12")),
    Attempt("ddp.bench safety", "--rounds is 3 on rank 0, but 4 on rank 1", ranks=("", "--rounds 4")),
    # A command that is one process, or starts its own, in a job.
    *(
        Attempt(command, r"is started once, and not by torchrun: start it with python -m", ranks=("", ""))
        for command in (
            "ddp.bench allreduce", "ddp.bench scaling", "ddp.bench engines", "dataparallel.bench",
            "dataparallel.train --run-dir {here}/run", "dataloading.bench", "dataloading.ladder",
            "dataloading.lfw_dataset", "ddp.checkpoint inspect --run-dir {run}",
        )
    ),
    # Mistakes that both ranks make are said once.
    Attempt(RUN, "--batch-size 49 does not divide", ranks=("--batch-size 49", "--batch-size 49"), writes=BEFORE_A_RUN),
    Attempt(RUN, "--model nowhere:build", ranks=("--model nowhere:build",) * 2, writes=BEFORE_A_RUN),
    Attempt(f"{RUN} --run-dir /proc/run", "--run-dir /proc/run cannot be written", ranks=("", "")),
    Attempt(f"{RUN} --interface eth77", "--interface eth77 is not an interface of ", ranks=("", "")),
    Attempt(RUN, r"--bach-size", ranks=("--bach-size 3",) * 2),
]  # fmt: skip
