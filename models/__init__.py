"""Generative models: Pyro programs over a `ClientBatch`, one file per model.

Likelihoods for networks are in `hierfl.models.likelihood`, response families of formulas in
`hierfl.models.families`, priors that use a Bregman divergence in
`hierfl.models.bregman`, and the learned priors of FedMAP in `hierfl.models.learned_priors`.
"""

import lazy_loader

if __name__ != "hierfl.models":
    raise ImportError("import hierfl.models, not the folder models/")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
