"""The rows of one hospital, from a folder on its own machine."""

from pathlib import Path

import pandas as pd

import hierfl


def rows(folder: str | Path) -> hierfl.ClientData:
    """Read `patients.csv` of a folder that is named after its hospital: columns x0, x1, ..., and y."""
    place = Path(folder)
    frame = pd.read_csv(place / "patients.csv")
    x = frame[[name for name in frame.columns if name != "y"]].to_numpy()
    return hierfl.ClientData.from_arrays([place.name] * len(frame), x=x, y=frame["y"].to_numpy())
