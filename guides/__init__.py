"""Guides: families of approximate posteriors for any model, one file per family.

Pyro's automatic guides keep params in modules and cannot run one client at a time, by a key.
"""

import lazy_loader

if __name__ != "hierfl.guides":
    raise ImportError("import hierfl.guides, not the folder guides/")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
