"""hierfl on Flower: the apps of a run, and a run served by this process (the extra `flower` installs flwr)."""

import lazy_loader

# The public names are listed in __init__.pyi. Each is imported when it is first used: a node starts
# a process for every message, and needs none of what serves a run.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
