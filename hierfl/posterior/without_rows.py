"""What a fit can answer without its clients' rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from hierfl.core.trees import named_leaves
from hierfl.data.absent import RowsNotSaved, is_absent, stand_in
from hierfl.posterior.snapshot import Restricted, Snapshot
from hierfl.program.program import Program

Found = TypeVar("Found")


def lacks_rows(fit: Snapshot) -> bool:
    """Return whether the rows of a fit's clients are not there."""
    return is_absent(fit.federation.data)


def by_state_alone(fit: Snapshot) -> Snapshot:
    """Return a fit whose guide can run, with stand-in rows where it reads none."""
    if not lacks_rows(fit):
        return fit
    if fit.program.reads.guide:
        raise _needed(f"the guide reads the clients' {', '.join(sorted(fit.program.reads.guide))}")
    return _with_stand_in(fit, 0)


def the_same_for_any_rows(
    fit: Snapshot, draw: Callable[[Snapshot], Found], tensors: Callable[[Found], object]
) -> Found:
    """Return what a function gives with two stand-ins for the missing rows, if it is the same."""
    first, second = (draw(_with_stand_in(fit, which)) for which in (0, 1))
    ours, theirs = named_leaves(tensors(first)), named_leaves(tensors(second))
    for name, value in ours.items():
        if not torch.equal(value, theirs[name]):
            raise _needed(f"'{_site(name)}' depends on them")
    return first


def global_sites(program: Program) -> frozenset[str]:
    """Return the names of the global sites, latent and deterministic."""
    latent = {site.name for site in program.latents.sites if not site.is_local}
    return frozenset(latent | {n for n, plates in program.derived.items() if plates is None})


def _site(leaf: str) -> str:
    """Return the site in the name of a leaf, such as "[1]['slope']"."""
    return leaf.split("[")[-1].strip("]'")


def _with_stand_in(fit: Snapshot, which: int) -> Restricted:
    federation = replace(fit.federation, data=stand_in(fit.federation.data, which))
    return Restricted(fit.method, federation, fit.progress, fit.message)


def _needed(why: str) -> RowsNotSaved:
    return RowsNotSaved(
        f"this fit was saved without its clients' rows, which are needed here ({why}): hand them "
        "in, hierfl.load(folder, data=...)"
    )
