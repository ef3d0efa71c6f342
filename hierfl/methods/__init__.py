"""Methods, one file each: what client and server do, and the equations they come from.

The four papers' methods are at the top: `fedabml`, `fedmap`, `fedvi` and `pfedbred`. The folders
hold the others by kind, the wrappers of any method, and the parts that several methods share.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
