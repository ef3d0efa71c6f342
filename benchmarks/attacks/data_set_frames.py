"""Strange pandas frames, handed to `ClientData.from_frame`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.attacks.data_set_cases import Case, Table
from hierfl import ClientData


def strings_in_a_frame(t: Table, rng: np.random.Generator) -> Case:
    """Strings and categories, coded; new data with fewer levels get the same codes."""
    words = ["no", "yes", "maybe"]
    codes = [0, 1, 2, *rng.integers(0, 3, len(t.ids)).tolist()][: len(t.ids)]
    strings = [words[c] for c in codes]
    kind = [object, "category", "string"][int(rng.integers(3))]
    frame = pd.DataFrame({"who": t.ids, "w": pd.Series(strings, dtype=kind)})
    frame.index = pd.Index([7] * len(t.ids))
    few = frame.iloc[: max(1, len(t.ids) // 2)]

    def make() -> list[tuple[list[str], list[str]]]:
        train = ClientData.from_frame(frame, "who", w="w")
        new = ClientData.from_frame(few, "who", levels=train.levels, w="w")
        return [
            (
                sorted(train.levels["w"][c] for c in d.fields["w"].tolist()),
                sorted(source["w"].astype(str)),
            )
            for d, source in ((train, frame), (new, few))
            if d.levels == train.levels
        ]

    return Case(make, ("'w'",), lambda pairs: len(pairs) == 2 and all(a == b for a, b in pairs))


def frames_to_refuse(t: Table, rng: np.random.Generator) -> Case:
    """Columns that are missing, twice there, not constant, mixed, or of unknown levels."""
    frame = pd.DataFrame({"who": t.ids, "y": t.y, "w": ["u"] * len(t.ids)})
    frame.loc[frame.index[-1], "w"] = "v"
    twice = pd.concat([frame, frame[["y"]]], axis=1)
    gap = frame.assign(w=frame["w"].where(frame.index > 0))
    read = ClientData.from_frame
    made: list[tuple[Callable[[], Any], str]] = [
        (lambda: read(frame, "nobody", y="y"), "'nobody'"),
        (lambda: read(frame, "who", y="z"), "'z'"),
        (lambda: read(twice, "who", y="y"), "'y'"),
        (lambda: read(gap, "who", w="w"), "'w'"),
        (lambda: read(frame.assign(w=frame["y"].astype(str)), "who", w="w"), "'w'"),
        (lambda: read(frame.assign(w=["u", 1.0] + ["u"] * (len(frame) - 2)), "who", w="w"), "'w'"),
        (lambda: read(frame.assign(w=["u ", *["u"] * (len(frame) - 1)]), "who", w="w"), "w"),
        (lambda: read(frame, "who", y="y", client_fields={"y2": "y"}), "'y2'"),
        (lambda: read(frame, "who", w="w", levels={"w": ["u"]}), "'v'"),
        (lambda: read(frame, "who", y="y", levels={"y": ["u"]}), "'y'"),
        (lambda: read(frame.assign(when=pd.Timestamp(0)), "who", y="when"), "'y'"),
        (lambda: read(frame.to_dict(), "who", y="y"), "frame"),
        (lambda: read(frame, "who", y=[]), "'y'"),
    ]
    make, thing = made[int(rng.integers(len(made)))]
    return Case(make, (thing,))
