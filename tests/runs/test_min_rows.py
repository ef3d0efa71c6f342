"""Clients with fewer rows than `min_rows` take no part in a fit, and may join it afterwards."""

import pytest
import torch

from hierfl.core.trees import tree_leaves
from hierfl.methods import fedsvi
from tests.programs import federation, fit, regression

COUNTS = (5, 2, 7, 1)


def test_the_fit_is_that_of_the_clients_with_rows_enough() -> None:
    data = federation(COUNTS)
    names = [name for name, count in zip(data.names, COUNTS, strict=True) if count >= 5]
    with pytest.warns(UserWarning, match=r"2 of 4 clients have fewer than 5 rows.*personalize"):
        fitted = fit(fedsvi(regression), data, rounds=2, min_rows=5, validation=data, eval_every=1)
    large = data.select(names)
    alone = fit(fedsvi(regression), large, rounds=2, validation=large, eval_every=1)
    assert list(fitted.clients) == names
    ours, theirs = (tree_leaves([f.progress.server, f.progress.table]) for f in (fitted, alone))
    assert all(map(torch.equal, ours, theirs))
    assert fitted.history.equals(alone.history.assign(seconds=fitted.history["seconds"]))


def test_those_left_out_may_join_afterwards() -> None:
    data = federation(COUNTS)
    with pytest.warns(UserWarning, match="do not take part"):
        fitted = fit(fedsvi(regression), data, rounds=2, min_rows=5)
    few = data.select([name for name in data.names if name not in fitted.clients])
    joined = fitted.personalize(few, rounds=1)
    assert joined.predict(few).mean.isfinite().all()
    ours, theirs = (tree_leaves(f.progress.server) for f in (fitted, joined))
    assert all(map(torch.equal, ours, theirs)), "they move no global param"


WRONG = {8: "no client has that many rows: the largest has 7", 0: "it must be 1 or more"}


@pytest.mark.parametrize("least", WRONG)
def test_bad_numbers_are_refused(least: int) -> None:
    with pytest.raises(ValueError, match=f"min_rows is {least}.*{WRONG[least]}"):
        fit(fedsvi(regression), federation(COUNTS), rounds=1, min_rows=least)
