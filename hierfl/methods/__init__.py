"""Methods, one file each: what a client does, what the server does, and the equations they come from."""

from hierfl.methods.apfl import apfl
from hierfl.methods.averaging_some import averaging_some
from hierfl.methods.batch_normed import batch_normed
from hierfl.methods.bfi import bfi
from hierfl.methods.by_rows import by_rows
from hierfl.methods.clustered_fl import clustered_fl
from hierfl.methods.differentially_private import differentially_private
from hierfl.methods.ditto import ditto, local_only
from hierfl.methods.fedabml import fedabml
from hierfl.methods.fedamp import fedamp, heur_fedamp
from hierfl.methods.fedavg import fedavg
from hierfl.methods.fedbabu import fedbabu
from hierfl.methods.fedbn import fedbn
from hierfl.methods.fedem import fedem
from hierfl.methods.fedep import fedep
from hierfl.methods.fedfomo import fedfomo
from hierfl.methods.fedlaplace import fedlaplace
from hierfl.methods.fedmap import fedmap
from hierfl.methods.fedpa import fedpa
from hierfl.methods.fedpac import fedpac
from hierfl.methods.fedpop import fedpop
from hierfl.methods.fedrecon import fedrecon
from hierfl.methods.fedrep import fedrep
from hierfl.methods.fedsvi import fedsvi
from hierfl.methods.fedvi import fedvi
from hierfl.methods.fine_tuned import fine_tuned
from hierfl.methods.ifca import ifca
from hierfl.methods.knn_per import knn_per
from hierfl.methods.over_relaxed import over_relaxed
from hierfl.methods.per_fedavg import per_fedavg
from hierfl.methods.pfedbayes import pfedbayes
from hierfl.methods.pfedbred import pfedbred
from hierfl.methods.pfedhn import pfedhn
from hierfl.methods.pfedme import pfedme
from hierfl.methods.pvi import pvi
from hierfl.methods.quantized import quantized
from hierfl.methods.robust import robust
from hierfl.methods.scaffold import scaffold
from hierfl.methods.server_optimized import server_optimized
from hierfl.methods.two_stage import two_stage

__all__ = [
    "apfl",
    "averaging_some",
    "batch_normed",
    "bfi",
    "by_rows",
    "clustered_fl",
    "differentially_private",
    "ditto",
    "fedabml",
    "fedamp",
    "fedavg",
    "fedbabu",
    "fedbn",
    "fedem",
    "fedep",
    "fedfomo",
    "fedlaplace",
    "fedmap",
    "fedpa",
    "fedpac",
    "fedpop",
    "fedrecon",
    "fedrep",
    "fedsvi",
    "fedvi",
    "fine_tuned",
    "heur_fedamp",
    "ifca",
    "knn_per",
    "local_only",
    "over_relaxed",
    "per_fedavg",
    "pfedbayes",
    "pfedbred",
    "pfedhn",
    "pfedme",
    "pvi",
    "quantized",
    "robust",
    "scaffold",
    "server_optimized",
    "two_stage",
]
