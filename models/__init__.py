"""Generative models: Pyro programs over a `ClientBatch`, one file per model."""

import lazy_loader

if __name__ != "hierfl.models":
    raise ImportError("import hierfl.models, not the folder models/")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
