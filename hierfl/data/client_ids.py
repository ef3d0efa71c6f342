"""Clients' ids as users pass them, and clients' names: none missing, none that look alike."""

from __future__ import annotations

import numbers
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hierfl.data.arrays import Array, is_missing

MISSING = frozenset({"nan", "NaN", "NaT", "<NA>", "None", "masked"})
_WIDEST = 64  # characters of an id that is kept in an array of strings
_RULE = "client_id must be integers or strings, all of one kind and none missing (NaN)"


def ids_of(client_id: Array) -> NDArray[Any]:
    """Return one id per row, (n,): integers, booleans, dates or strings."""
    if isinstance(client_id, Tensor):
        client_id = client_id.detach().cpu().resolve_conj().resolve_neg()
    if isinstance(client_id, np.ma.MaskedArray) and np.ma.getmaskarray(client_id).any():
        raise ValueError(
            f"client_id has {int(np.ma.getmaskarray(client_id).sum())} masked rows: leave these "
            "rows out, or fill their ids"
        )
    if isinstance(client_id, list | tuple) and {type(i) for i in client_id} != {Tensor}:
        raw = _objects(client_id)
    else:
        raw = np.asarray(client_id)
    if raw.ndim != 1:
        what = f"has shape {raw.shape}" if raw.ndim else f"is a single {type(client_id).__name__}"
        raise ValueError(f"client_id {what}: give one id per row, of shape (n,)")
    if len(raw) == 0:
        raise ValueError("client_id has no rows: give at least one row of one client")
    return _of_objects(raw) if raw.dtype.kind == "O" else _checked(raw)


def _objects(ids: Sequence[Any]) -> NDArray[Any]:
    """Return a list as an array of its entries, (n,), unless an entry is a sequence itself."""
    if any(isinstance(i, list | tuple | np.ndarray) for i in ids):
        return np.asarray(ids)
    raw = np.empty(len(ids), object)
    raw[:] = ids
    return raw


def _of_objects(raw: NDArray[Any]) -> NDArray[Any]:
    """Return Python objects as integers, booleans or strings, whichever all of them are."""
    first = _kind(type(raw[0]))
    if len({_kind(kind) for kind in set(map(type, raw))}) > 1 or first not in (
        "int",
        "bool",
        "str",
    ):
        for row, value in enumerate(raw):
            if is_missing(value):
                raise TypeError(f"client_id is {value} in row {row}: {_RULE}")
        odd = next((v for v in raw if _kind(type(v)) != first), raw[0])
        both = f"{raw[0]!r} and {odd!r}" if odd is not raw[0] else f"{odd!r}"
        raise TypeError(f"client_id holds {both}: {_RULE}")
    listed = raw.tolist()
    # an array of strings drops NUL at their ends, and is as wide as the longest of them
    if first == "str" and ("\0" in "".join(listed) or max(map(len, listed)) > _WIDEST):
        return raw
    found = np.array(listed)
    return raw if found.dtype.kind == "f" else found  # integers beyond int64 beside smaller ones


def _kind(kind: type) -> str:
    if issubclass(kind, bool | np.bool_):
        return "bool"
    if issubclass(kind, numbers.Integral):
        return "int"
    return "str" if issubclass(kind, str) else kind.__name__


def _checked(raw: NDArray[Any]) -> NDArray[Any]:
    """Refuse missing dates, and ids that are not integers, booleans, strings or dates."""
    if raw.dtype.kind in "Mm":
        if np.isnat(raw).any():
            raise TypeError(f"client_id is NaT in row {int(np.isnat(raw).argmax())}: {_RULE}")
    elif raw.dtype.kind == "f" and np.isnan(raw).any():
        raise TypeError(f"client_id is nan in row {int(np.isnan(raw).argmax())}: {_RULE}")
    elif raw.dtype.kind not in "iubU":
        raise TypeError(f"client_id holds {raw[0]!r}: {_RULE}")
    return raw


# -------------------------------------------------------------------------------------------- names
def check_client_names(names: Sequence[str]) -> None:
    """Refuse names that are missing, cannot be written, occur twice, or look like another."""
    if not names:
        raise ValueError("there are no clients: give at least one row of one client")
    try:
        joined = "".join(names)
    except TypeError as error:
        odd = next(n for n in names if not isinstance(n, str))
        raise TypeError(f"a client is named {odd!r}: names must be strings") from error
    different = set(names)
    if len(different) < len(names):
        repeated = Counter(names).most_common(1)[0][0]
        raise ValueError(f"two clients are named '{repeated}': client names must be unique")
    if missing := different & MISSING:
        raise ValueError(
            f"a client is named '{min(missing)}', the word for a missing value: leave its rows "
            "out, or rename it"
        )
    if not joined.isprintable():
        _check_characters(names)
    alike = look_alike(names, joined)
    if alike:
        raise ValueError(
            f"clients {alike[0]!r} and {alike[1]!r} differ only in spaces or in Unicode form: make "
            "them one client, or rename one"
        )
    if any(not n.strip() for n in names):
        raise ValueError("a client has an empty name: name it, or leave its rows out")


def _check_characters(names: Iterable[str]) -> None:
    for name in names:
        if any(unicodedata.category(c) in ("Cc", "Cs") for c in name):
            raise ValueError(
                f"client {name!r} has a control character or half a character in its name: rename "
                f"it"
            )


def look_alike(names: Sequence[str], joined: str) -> tuple[str, str] | None:
    """Return two names that differ only in spaces, invisible characters or Unicode form."""
    plain_text = joined.isascii() and joined.isprintable()
    if plain_text and (
        " " not in joined or len({" ".join(n.split()) for n in names}) == len(names)
    ):
        return None
    seen: dict[str, str] = {}
    for name in names:
        visible = "".join(c for c in name if unicodedata.category(c) != "Cf")
        plain = " ".join(unicodedata.normalize("NFC", visible).split())
        if plain in seen:
            return seen[plain], name
        seen[plain] = name
    return None
