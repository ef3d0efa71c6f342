"""Methods, one file each: what a client does, what the server does, and the equations they come from."""

from hierfl.methods.averaging_some import averaging_some
from hierfl.methods.bfi import bfi
from hierfl.methods.by_rows import by_rows
from hierfl.methods.ditto import ditto, individual
from hierfl.methods.fedabml import fedabml
from hierfl.methods.fedavg import fedavg
from hierfl.methods.fedbn import fedbn
from hierfl.methods.fedep import fedep
from hierfl.methods.fedlaplace import fedlaplace
from hierfl.methods.fedmap import fedmap
from hierfl.methods.fedpa import fedpa
from hierfl.methods.fedpop import fedpop
from hierfl.methods.fedsvi import fedsvi
from hierfl.methods.fedvi import fedvi
from hierfl.methods.fine_tuned import fine_tuned
from hierfl.methods.over_relaxed import over_relaxed
from hierfl.methods.per_fedavg import per_fedavg
from hierfl.methods.pfedbayes import pfedbayes
from hierfl.methods.pfedbred import pfedbred
from hierfl.methods.pfedme import pfedme
from hierfl.methods.pvi import pvi
from hierfl.methods.scaffold import scaffold
from hierfl.methods.two_stage import two_stage

__all__ = [
    "averaging_some",
    "bfi",
    "by_rows",
    "ditto",
    "fedabml",
    "fedavg",
    "fedbn",
    "fedep",
    "fedlaplace",
    "fedmap",
    "fedpa",
    "fedpop",
    "fedsvi",
    "fedvi",
    "fine_tuned",
    "individual",
    "over_relaxed",
    "per_fedavg",
    "pfedbayes",
    "pfedbred",
    "pfedme",
    "pvi",
    "scaffold",
    "two_stage",
]
