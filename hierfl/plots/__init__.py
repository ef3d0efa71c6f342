"""Plots of runs, posteriors and predictions.

Each function draws on the Matplotlib Axes that it is given, and returns them.
"""

import lazy_loader

# The public names are listed in __init__.pyi. Each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
