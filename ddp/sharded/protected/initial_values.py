"""Models on the meta device: each unit gets memory and initial values when it is sharded, so no rank ever holds all of the model."""

from __future__ import annotations

import torch

from ddp.sharded.units import Unit


def materialize(unit: Unit, device: torch.device) -> None:
    """Give the modules that hold a unit's parameters memory and initial values, if they are on the meta device.

    :raises ValueError: if such a module has no ``reset_parameters()``
    """
    parts = dict.fromkeys(part for owners in unit.owners.values() for part, _ in owners)
    if not unit.name:
        parts |= dict.fromkeys(part for part in unit.module.modules() if next(part.parameters(False), None) is None)
    for part in parts:
        if not any(tensor.is_meta for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            continue
        reset = getattr(part, "reset_parameters", None)
        if not callable(reset):
            raise ValueError(
                f"{type(part).__name__} is on the meta device and has no reset_parameters() that would give it values: add "
                "one, or build the model on the CPU"
            )
        part.to_empty(device=device, recurse=False)
        with torch.no_grad():
            reset()
    for (first, name), *others in unit.owners.values():  # to_empty gives each owner of a tied parameter its own
        for part, other_name in others:
            setattr(part, other_name, first.get_parameter(name))
