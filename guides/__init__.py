"""Guides: families of approximate posteriors for any model, one file per family.

Pyro's own automatic guides draw from torch's generator, keep their params in modules and fix the
number of clients at their first call. They therefore cannot run one client at a time, with noise
that is a function of a key. A hand-written guide function can be used wherever a family can.
"""

if __name__ != "hierfl.guides":
    raise ImportError("import hierfl.guides, not the folder guides/")

from hierfl.guides.amortized import amortized
from hierfl.guides.conditional import conditional
from hierfl.guides.constructed import constructed
from hierfl.guides.delta import delta
from hierfl.guides.global_sites import diagonal_normal, full_normal, low_rank_normal, spline_flow
from hierfl.guides.low_rank import low_rank
from hierfl.guides.mean_field import mean_field
from hierfl.guides.structured import structured
from hierfl.guides.unrolled import unrolled

__all__ = [
    "amortized",
    "conditional",
    "constructed",
    "delta",
    "diagonal_normal",
    "full_normal",
    "low_rank",
    "low_rank_normal",
    "mean_field",
    "spline_flow",
    "structured",
    "unrolled",
]
