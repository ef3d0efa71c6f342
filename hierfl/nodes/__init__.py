"""Clients on machines of their own: what they agree on, what crosses, and the rounds of a server without rows."""

import lazy_loader

# Names are in __init__.pyi, imported at first use: a node starts a process for every message.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
