"""The clients' rows: `ClientData`, batches of it, partitions, scaling."""

from hierfl.data.clients import ClientData

__all__ = ["ClientData"]
