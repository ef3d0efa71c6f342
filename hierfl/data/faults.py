"""What is wrong with a client's rows, and how much of it may be told elsewhere."""

from __future__ import annotations


class RowsFault(ValueError):
    """Rows that cannot be used.

    The message is for their owner. `told` names a column and the kind of fault, and no value: it is
    what a node may say of them.
    """

    def __init__(self, message: str, told: str = "") -> None:
        super().__init__(message)
        self.told = told


class KindFault(RowsFault, TypeError):
    """A column of values of another type."""
