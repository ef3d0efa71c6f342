"""hierfl: hierarchical Bayesian federated learning on Pyro. One program, with a plate over clients."""

import lazy_loader

__version__ = "0.3.0"

# The public names are listed in __init__.pyi. Each is imported when it is first used, so that
# `import hierfl` stays light.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
