"""Guides: families of approximate posteriors for any model, one file per family.

Pyro's own automatic guides draw from torch's generator, keep their params in modules and fix the
number of clients at their first call. They therefore cannot run one client at a time, with noise
that is a function of a key. A hand-written guide function can be used wherever a family can.
"""

import lazy_loader

if __name__ != "hierfl.guides":
    raise ImportError("import hierfl.guides, not the folder guides/")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
