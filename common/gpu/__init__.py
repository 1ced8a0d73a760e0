"""GPUs: which one is whose, the implementation of NCCL, versions, and the cores beside a GPU."""
