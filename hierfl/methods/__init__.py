"""Methods, one file each: what a client does, what the server does, and the equations they come from."""

from hierfl.methods.fedavg import fedavg
from hierfl.methods.fedsvi import fedsvi
from hierfl.methods.pfedbayes import pfedbayes
from hierfl.methods.pfedme import pfedme

__all__ = ["fedavg", "fedsvi", "pfedbayes", "pfedme"]
