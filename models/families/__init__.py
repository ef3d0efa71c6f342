"""Response families of formulas: likelihoods with their links and default priors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
