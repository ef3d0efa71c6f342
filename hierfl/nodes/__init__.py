"""Clients on machines of their own: what they agree on, what crosses, and the rounds of a server without rows."""

import lazy_loader

# The public names are listed in __init__.pyi. Each is imported when it is first used: a node starts
# a process for every message, and needs none of what the server does.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
