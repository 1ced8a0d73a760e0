"""A resumed run trains on from the average of its weights, because the average was in the model when it was saved

Found in 2026: the average was swapped in for the evaluation, and the checkpoint was written before it was swapped out.
The file holds the average twice, and the weights that were trained not at all.

- atomistic-machine-learning/schnetpack#785
"""

from copy import deepcopy

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddp.museum.exhibit import BROKEN, batches, ddp_and_sgd, finish, shared_folder, start, train

rank, ranks = start()
model, optimizer = ddp_and_sgd()
average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
with shared_folder() as folder:
    file = folder / f"rank{rank}.pt"
    for epoch in range(3):
        train(model, optimizer, batches())
        average.update_parameters(model.module)
        trained = deepcopy(model.state_dict())
        model.module.load_state_dict(average.module.state_dict())  # for an evaluation, which is left out here
        weights = model.state_dict() if BROKEN else trained
        torch.save((weights, average.state_dict(), optimizer.state_dict(), epoch), file)  # audit: resumed-from-average
        saved, *_ = torch.load(file)  # the job stopped, and resumes (plain SGD has no state to load)
        model.load_state_dict(saved)
finish("distance of the saved weights", torch.dist(saved["module.weight"], trained["module.weight"]).item())
