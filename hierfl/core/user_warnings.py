"""Warnings that show the user's own line, whatever of hierfl lies between."""

import sys
import warnings
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[1])


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line from which hierfl was called."""
    frame: FrameType | None = sys._getframe(1)
    level = outside = 2  # of the frame, as warnings count; of the caller of the outermost call
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            outside = level + 1
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=outside)
