"""hierfl on Flower: the apps of a run, and a run served by this process (extra `flower`)."""

from importlib import import_module
from typing import TYPE_CHECKING

from hierfl.flower.apps import Apps, apps

if TYPE_CHECKING:
    from hierfl.flower.link import SuperLink, superlink

__all__ = ["Apps", "SuperLink", "apps", "superlink"]

# Public name -> its module, imported when the name is first used: a node starts a process for every
# message, and
# needs none of what serves a run.
_MODULE_OF = {"SuperLink": "hierfl.flower.link", "superlink": "hierfl.flower.link"}

if not TYPE_CHECKING:  # hidden from type checkers, which would accept any misspelled name

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used (PEP 562)."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'hierfl.flower' has no attribute '{name}'")
        value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value
