"""Units: the parts of a model whose parameters are gathered together.

A unit is a module, usually one of the repeated blocks. Small units save more memory, since at stage 3 a rank holds one or two
of them at a time; large ones save messages. Parameters in no unit belong to the root, which is the model itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from common.models.modules import shared_memory
from ddp.sharded.flat import Owner

SMALL = 32_768  # parameters; a smaller block stays with the root, unless it is named


@dataclass(frozen=True, eq=False)
class Unit:
    """A module, and the parameters in it that no other unit has.

    :param name: as in ``named_modules()``; empty for the root
    :param owners: for each parameter by name, the modules that hold it
    """

    name: str
    module: nn.Module
    owners: dict[str, list[Owner]]


def divide(module: nn.Module, units: Iterable[nn.Module] | None = None) -> list[Unit]:
    """The units of a model: the root, then the others in the order of ``named_modules()``. Only the root may be empty.

    A parameter that several units share belongs to the root, which is whole whenever one of them runs.

    :param units: submodules; None takes the children of every ``ModuleList`` and ``Sequential`` that have :data:`SMALL`
        parameters or more, but none within another
    :raises ValueError: if a unit is no submodule, or lies within another; if two parameters lie in the same memory
    """
    for one, other in sorted(shared_memory(module)):
        raise ValueError(
            f"{one} and {other} share memory, but are two parameters, whose shards would differ: let both modules have the same one"
        )
    chosen = dict(_repeated_blocks(module)) if units is None else _checked(module, list(units))
    found_in: dict[nn.Parameter, set[str]] = {}  # names of units, "" for the root
    owners: dict[nn.Parameter, list[Owner]] = {}
    # Not from named_modules(): torch's checkpoint_wrapper leaves its own prefix out of parameters' names.
    names = {parameter: name for name, parameter in module.named_parameters()}
    for path, part in module.named_modules(remove_duplicate=False):  # a module may lie in two units
        for name, parameter in part._parameters.items():
            if parameter is not None:
                unit = next((unit for unit in chosen if _is_in(path, unit)), "")
                found_in.setdefault(parameter, set()).add(unit)
                if (part, name) not in owners.setdefault(parameter, []):
                    owners[parameter].append((part, name))
    parts = {name: Unit(name, part, {}) for name, part in {"": module, **chosen}.items()}
    for parameter, places in found_in.items():
        home = places.pop() if len(places) == 1 else ""  # shared by several units: to the root
        parts[home].owners[names[parameter]] = owners[parameter]
    return [unit for name, unit in parts.items() if unit.owners or not name]


def by_dtype(unit: Unit) -> Iterator[dict[str, list[Owner]]]:
    """The parameters of a unit that are trained, in groups of one dtype and device each."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, list[Owner]]] = {}
    for name, owners in unit.owners.items():
        part, attribute = owners[0]
        parameter = part.get_parameter(attribute)
        if parameter.requires_grad:
            kinds.setdefault((parameter.dtype, parameter.device), {})[name] = owners
    yield from kinds.values()


def _repeated_blocks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of lists and sequences that are worth a gather of their own."""
    chosen: list[str] = []
    lists = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    for name, part in module.named_modules():
        parent = name.rpartition(".")[0]
        if not name or parent not in lists or any(_is_in(name, unit) for unit in chosen):
            continue
        if sum(parameter.numel() for parameter in part.parameters()) >= SMALL:
            chosen.append(name)
            yield name, part


def _checked(module: nn.Module, units: list[nn.Module]) -> Mapping[str, nn.Module]:
    names = {part: name for name, part in module.named_modules() if name}
    for unit in units:
        if unit not in names:
            raise ValueError(f"units: a {type(unit).__name__} is no submodule of the model")
    chosen = {name: part for part, name in names.items() if part in units}
    for name in chosen:
        for other in chosen:
            if name != other and _is_in(name, other):
                raise ValueError(f"units: {name} lies within {other}: list one of them")
    return chosen


def _is_in(path: str, unit: str) -> bool:
    return path == unit or path.startswith(f"{unit}.")
