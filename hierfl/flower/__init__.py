"""hierfl on Flower: the apps of a run, and a run served by this process (the extra `flower` installs flwr)."""

from typing import Any

import lazy_loader

from hierfl.core.extras import extras_for

# Names are in __init__.pyi, imported at first use: a node starts a process for every message.
_loaded, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    with extras_for(f"hierfl.flower.{name}"):
        return _loaded(name)
