"""One process per device: DistributedDataParallel and everything around it that a real job needs."""

import sys as _sys
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path

# A project's own ``common`` may come first on Python's path. The modules here would then import from it.
_ours = _Path(__file__).resolve().parent.with_name("common")
_spec = _find_spec("common")
_found = list(_spec.submodule_search_locations or [_spec.origin or ""]) if _spec else ["nowhere"]
if _ours not in [_Path(folder).resolve() for folder in _found]:
    raise ImportError(
        f"{__name__} needs its package 'common' in {_ours}, but Python finds {_found[0]} first: rename that one, or start "
        "Python in another folder"
    )
if _sys.argv[:1] == ["-m"]:  # python -m is importing this package, to run one of its modules as a command
    from common.signals import early_signals as _early_signals

    _early_signals.handle_signals()
