"""A small frame of three clients, and short ways to agree on a formula over it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import hierfl
from hierfl.formulas.levels import Rare

RNG = np.random.default_rng(0)
BASE = pd.DataFrame(
    {"h": np.repeat(list("abc"), 20), "x": RNG.normal(size=60), "z": RNG.normal(size=60)}
)
BASE["y"] = 1 + BASE.x + RNG.normal(size=60)
BASE["b"] = (BASE.y > 1).astype(int)
BASE["u"] = np.tile(["r", "s", "t"], 20)
BASE["g"] = np.tile(["a", "b"], 30)


def on(
    text: str,
    family: str = "gaussian",
    frame: Any = BASE,
    levels: Mapping[str, Sequence[Any]] | None = None,
    rare: Rare = "refuse",
    **options: Any,
) -> hierfl.Formula:
    """Return a formula with the schema of a frame."""
    made = hierfl.formula(text, family, clients="h", **options)
    return made.on(frame, levels=levels, rare=rare)


def fields(formula: hierfl.Formula, frame: Any = BASE) -> dict[str, NDArray[Any]]:
    """Return all row fields and client fields as arrays."""
    data = formula.data(frame)
    return {k: v.numpy() for k, v in [*data.fields.items(), *data.client_fields.items()]}


def refused(call: Callable[[], Any], *words: str) -> str:
    """Return the message that refuses a call, once it has all words."""
    try:
        found = call()
    except (ValueError, TypeError, KeyError) as error:
        message = str(error)
        missing = [word for word in words if word.lower() not in message.lower()]
        assert not missing, f"the message lacks {missing}: {message}"
        return message
    raise AssertionError(f"not refused: {found}")
