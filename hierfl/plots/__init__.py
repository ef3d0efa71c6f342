"""Plots of runs, posteriors and predictions, on the Matplotlib Axes that are given."""

import lazy_loader

# The public names are listed in __init__.pyi. Each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
