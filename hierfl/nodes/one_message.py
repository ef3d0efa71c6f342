"""One message at a time in a node's folder, whatever number of processes answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hierfl.nodes.messages import Refused
from hierfl.runs.run_folder import FolderInUse, held

LONGEST = 600.0  # seconds that a message waits for the one before it
PAUSE = 0.02


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait for the lock on a node's folder, and hold it; refuse after too long."""
    until = time.monotonic() + LONGEST
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(held(folder))
                break
            except FolderInUse as error:
                if time.monotonic() > until:
                    raise Refused("the node is busy with another message: ask again") from error
                time.sleep(PAUSE)
        yield
