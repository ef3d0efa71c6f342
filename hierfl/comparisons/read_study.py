"""Finds and reads study files, and says what is wrong with one, with the nearest known key."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hierfl.comparisons.study_data import SHIPPED
from hierfl.comparisons.study_file import Study
from hierfl.core.arguments import did_you_mean

# a variant's name becomes a folder's
FOLDER_NAME = re.compile(r"[\w(][\w .,+=()-]{0,80}(?<![. ])")


# keys of the table [list] of a study file: what it shows, how long both its forms take
LISTED = ("shows", "quick", "full")


def read(path: str | Path, *, quick: bool = False) -> dict[str, Study]:
    """Return the studies of a TOML file by variant, "" if it has none; `quick` applies its `[quick]`."""
    file = Path(path)
    tables = _tables(file)
    for key, value in _table(file, tables, "list").items():
        if key not in LISTED or not isinstance(value, str):
            what = f"{file}: list.{key} is {value!r:.80}"
            raise ValueError(f"{what}: list has texts alone, {', '.join(LISTED)}")
    quicker = _table(file, tables, "quick")
    variants = _table(file, tables, "variants")
    for name in variants:
        if not FOLDER_NAME.fullmatch(name):
            raise ValueError(
                f"{file}: variants: {name!r} becomes the name of a folder: use letters, digits, "
                "spaces and . , + = ( ) - _ alone, no dot at an end"
            )
    studies = {}
    for name in list(variants) or [""]:
        changes = _table(file, variants, name, "variants.")
        quickest = changed(quicker, _table(file, changes, "quick", f"variants.{name}."))
        own = changed(tables, changes)
        try:
            studies[name] = Study.model_validate(own)
            if quick:
                own = changed(own, quickest)
                studies[name] = Study.model_validate(own)
        except ValidationError as error:
            of = f", as variant '{name}'," if name else ""
            lines = "\n".join(f"  {line}" for line in _mistakes(error, own))
            raise ValueError(f"{file}{of} is not a study:\n{lines}") from error
    return studies


def chosen(studies: Mapping[str, Study], names: Iterable[str] | None) -> list[str]:
    """Return the names of the variants that are asked for; None or none: of all."""
    selected = list(names or studies)
    for name in selected:
        if name not in studies:
            variants = ", ".join(variant for variant in studies if variant)
            what = f"choose from {variants}" if variants else "the file has none"
            raise ValueError(f"there is no variant '{name}': {what}")
    return selected


def changed(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with the keys of others in their place, table by table."""
    merged = dict(tables)
    for key, value in changes.items():
        below = merged.get(key)
        nested = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = changed(below, value) if nested else value  # type: ignore[arg-type]
    return merged


def _tables(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, IsADirectoryError) as error:  # of TOML or UTF-8
        raise ValueError(f"{file} is not a TOML file: {error}") from error


def _table(file: Path, tables: dict[str, Any], key: str, above: str = "") -> dict[str, Any]:
    table = tables.pop(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"{file}: {above}{key} must be a table, and is {table!r}")
    return dict(table)


def _mistakes(error: ValidationError, study: Mapping[str, Any]) -> Iterator[str]:
    left_out, methods = study.get("leave_out", ()), study.get("methods", {})
    tables = isinstance(methods, Mapping) and isinstance(left_out, list | tuple)
    labels = [label for label in methods if label not in left_out] if tables else []
    for mistake in error.errors():
        where = list(mistake["loc"])
        if labels and where[:1] == ["methods"] and len(where) > 1:
            where[1] = labels[int(where[1])]
        place = ".".join(str(part) for part in where)
        message = mistake["msg"].removeprefix("Value error, ")
        plain = mistake["type"] in ("missing", "value_error")
        shown = message if plain else f"{message} (it is {mistake['input']!r:.80})"
        yield f"{place}: {shown}" if place else shown


FOLDER = Path(str(files("hierfl.studies"))) / "shipped"


def names() -> list[str]:
    """Return the names of the studies that ship, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find(study: str) -> Path:
    """Return the file of a study: one that ships, by its name, or one's own, by its path."""
    if study in names():
        return FOLDER / f"{study}.toml"
    path = Path(study)
    if path.is_file():
        return path
    plain = path.name.removesuffix(".toml")
    fix = f"give the path of a file, or a name of {', '.join(names())}"
    raise FileNotFoundError(f"there is no study '{study}': {did_you_mean(plain, names(), fix)}")


def listed() -> Iterator[dict[str, str]]:
    """Yield name, data, variants and the keys of `LISTED` of each study that ships."""
    for name in names():
        file = FOLDER / f"{name}.toml"
        about, studies = _tables(file).get("list", {}), read(file)
        sets = dict.fromkeys(
            source if source in SHIPPED else f"{source} (HIERFL_DATA)"
            for study in studies.values()
            for source in (study.data.name, *study.evaluation.foreign)
            if source not in ("unseen_classes", "shuffled_pixels")
        )
        own = {"name": name, "data": ", ".join(sets), "variants": ", ".join(filter(None, studies))}
        yield {**dict.fromkeys(LISTED, ""), **about, **own}
