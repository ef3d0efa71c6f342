"""The clients' rows: `ClientData`, batches, partitions and preprocessing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
