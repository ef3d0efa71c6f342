"""hierfl on Flower: the apps of a run, and a run served by this process (the extra `flower` installs flwr)."""

import lazy_loader

# Names are in __init__.pyi, imported at first use: a node starts a process for every message.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
