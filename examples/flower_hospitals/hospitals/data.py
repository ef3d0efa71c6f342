"""The rows of one hospital, from the folder on its own machine."""

from pathlib import Path

import pandas as pd

import hierfl


def rows(folder: str) -> hierfl.ClientData:
    """Read `patients.csv`: the columns x0, x1, ..., and y, of the hospital that the folder is named after."""
    frame = pd.read_csv(Path(folder) / "patients.csv")
    names = [name for name in frame.columns if name != "y"]
    return hierfl.ClientData.from_arrays([Path(folder).name] * len(frame), x=frame[names].to_numpy(), y=frame["y"])
