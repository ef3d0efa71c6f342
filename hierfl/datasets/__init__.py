"""Data sets: three ship with the package, the others are read from the folder named by HIERFL_DATA."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
