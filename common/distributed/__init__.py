"""The ranks of a job: their environment, their agreement, their logs."""

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
STORE_POLL_S = 0.01  # between two looks into the job's store
