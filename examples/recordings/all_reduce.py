"""Two sums over four ranks by one of the algorithms; the second is shown, when connections are open."""

import sys

import torch
import torch.distributed as dist

from ddp.all_reduce import choice, p2p

name = sys.argv[1]
dist.init_process_group("gloo")
if name == "hierarchical":  # two ranks on each of two hosts
    p2p.host_id = lambda: f"host {dist.get_rank() // 2}"
algorithm = choice.build_all_reduce(name)
buffer = algorithm.allocate(1 << 20, torch.float32, torch.device("cpu"))
for _ in range(2):
    buffer.fill_(dist.get_rank())
    dist.barrier()
    algorithm.run(buffer)
assert (buffer == sum(range(4))).all()
algorithm.close()
dist.destroy_process_group()
