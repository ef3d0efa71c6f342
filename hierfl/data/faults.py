"""What is wrong with a client's rows, and how much of it may be told elsewhere."""

from __future__ import annotations


class RowsFault(ValueError):
    """Rows that cannot be used.

    The message is for their owner. `public` names a column and the kind of fault, and no value: it
    is what a node may say of them.
    """

    def __init__(self, message: str, public: str = "") -> None:
        super().__init__(message)
        self.public = public
