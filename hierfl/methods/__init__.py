"""Methods, one file each: what a client does, what the server does, and the equations they come from."""

from hierfl.methods.bfi import bfi
from hierfl.methods.fedabml import fedabml
from hierfl.methods.fedavg import fedavg
from hierfl.methods.fedlaplace import fedlaplace
from hierfl.methods.fedsvi import fedsvi
from hierfl.methods.pfedbayes import pfedbayes
from hierfl.methods.pfedbred import pfedbred
from hierfl.methods.pfedme import pfedme
from hierfl.methods.pvi import pvi

__all__ = ["bfi", "fedabml", "fedavg", "fedlaplace", "fedsvi", "pfedbayes", "pfedbred", "pfedme", "pvi"]
