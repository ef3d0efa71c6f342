"""Methods, one file each: what client and server do, and the equations they come from."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
