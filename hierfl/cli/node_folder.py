"""The node.toml of a node that answers requests in files (docs/nodes_files.md)."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hierfl.core.arguments import imported
from hierfl.core.typed_json import made_of
from hierfl.data.clients import ClientData
from hierfl.nodes.choosing import FitCall
from hierfl.nodes.stations import Station

FILE = "node.toml"
OPTIONS = ("family", "clients", "missing")
Key = Literal["rows", "client", "model", "formula", "family", "clients", "missing"]
HOW = (
    'write rows = "rows.csv" and formula = "y ~ x + (x | hospital)", family = "bernoulli", clients '
    '= "hospital"; or model = "MODULE:NAME" and rows, a CSV file or "MODULE:NAME"'
)


def station_at(folder: Path) -> Station:
    """Return the station of a node whose folder has a valid `node.toml` (docs/nodes_files.md), or raise ValueError."""
    path = folder / FILE
    try:
        keys: dict[str, str] = made_of(dict[Key, str], tomllib.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(f"'{path}' cannot be read ({error}): {HOW}") from error
    if "rows" not in keys or ("model" in keys) == ("formula" in keys):
        raise ValueError(f"'{path}' must have rows, and a model or a formula: {HOW}")
    if "formula" in keys:
        from hierfl.formulas.formula import formula  # pandas, which most models do not need

        options: Any = {name: keys[name] for name in OPTIONS if name in keys}
        model: Any = formula(keys["formula"], **options)
    else:
        model = imported(keys["model"], folder)
    return Station(FitCall(model), lambda: _rows(keys, folder), folder)


def _rows(keys: Mapping[str, str], folder: Path) -> Any:
    """Return the rows of the file or name that `rows` is; of a `client`, where they do not name it."""
    if ":" in keys["rows"]:
        rows = imported(keys["rows"], folder)
        rows = rows() if callable(rows) else rows
    else:
        import pandas as pd

        rows = pd.read_csv(folder / keys["rows"])
    return rows if isinstance(rows, ClientData) or "client" not in keys else {keys["client"]: rows}
