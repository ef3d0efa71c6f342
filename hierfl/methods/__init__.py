"""Methods, one file each: what client and server do, and the equations they come from."""

from typing import TYPE_CHECKING

from hierfl.methods.apfl import apfl as apfl
from hierfl.methods.averaging_some import averaging_some as averaging_some
from hierfl.methods.batch_normed import batch_normed as batch_normed
from hierfl.methods.bfi import bfi as bfi
from hierfl.methods.by_rows import by_rows as by_rows
from hierfl.methods.clustered_fl import clustered_fl as clustered_fl
from hierfl.methods.differentially_private import differentially_private as differentially_private
from hierfl.methods.ditto import ditto as ditto
from hierfl.methods.ditto import local_only as local_only
from hierfl.methods.fedabml import fedabml as fedabml
from hierfl.methods.fedamp import fedamp as fedamp
from hierfl.methods.fedamp import heur_fedamp as heur_fedamp
from hierfl.methods.fedavg import fedavg as fedavg
from hierfl.methods.fedbabu import fedbabu as fedbabu
from hierfl.methods.fedbn import fedbn as fedbn
from hierfl.methods.fedem import fedem as fedem
from hierfl.methods.fedep import fedep as fedep
from hierfl.methods.fedfomo import fedfomo as fedfomo
from hierfl.methods.fedlaplace import fedlaplace as fedlaplace
from hierfl.methods.fedmap import fedmap as fedmap
from hierfl.methods.fedpa import fedpa as fedpa
from hierfl.methods.fedpac import fedpac as fedpac
from hierfl.methods.fedpop import fedpop as fedpop
from hierfl.methods.fedrecon import fedrecon as fedrecon
from hierfl.methods.fedrep import fedrep as fedrep
from hierfl.methods.fedsvi import fedsvi as fedsvi
from hierfl.methods.fedvi import fedvi as fedvi
from hierfl.methods.fine_tuned import fine_tuned as fine_tuned
from hierfl.methods.ifca import ifca as ifca
from hierfl.methods.knn_per import knn_per as knn_per
from hierfl.methods.over_relaxed import over_relaxed as over_relaxed
from hierfl.methods.per_fedavg import per_fedavg as per_fedavg
from hierfl.methods.pfedbayes import pfedbayes as pfedbayes
from hierfl.methods.pfedbred import pfedbred as pfedbred
from hierfl.methods.pfedhn import pfedhn as pfedhn
from hierfl.methods.pfedme import pfedme as pfedme
from hierfl.methods.pvi import pvi as pvi
from hierfl.methods.quantized import quantized as quantized
from hierfl.methods.robust import robust as robust
from hierfl.methods.scaffold import scaffold as scaffold
from hierfl.methods.server_optimized import server_optimized as server_optimized
from hierfl.methods.two_stage import two_stage as two_stage

if not TYPE_CHECKING:  # type checkers read the lines above
    __all__ = sorted(name for name, thing in globals().items() if hasattr(thing, "__about__"))
