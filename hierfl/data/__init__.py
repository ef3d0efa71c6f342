"""The clients' rows: `ClientData`, batches, partitions and preprocessing."""

from hierfl.data.clients import ClientData

__all__ = ["ClientData"]
