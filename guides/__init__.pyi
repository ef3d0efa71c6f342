from .amortized import amortized as amortized
from .amortized import constructed as constructed
from .conditional import conditional as conditional
from .delta import delta as delta
from .global_sites import diagonal_normal as diagonal_normal
from .global_sites import full_normal as full_normal
from .global_sites import low_rank_normal as low_rank_normal
from .global_sites import spline_flow as spline_flow
from .low_rank import low_rank as low_rank
from .mean_field import mean_field as mean_field
from .structured import structured as structured

__all__: list[str]
