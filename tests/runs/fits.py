"""Fits that several tests of runs ask, made once."""

from functools import cache

import hierfl
from hierfl import ClientData
from hierfl.methods import fedsvi
from tests.programs import federation, fit, logistic, regression


@cache
def two_rounds() -> hierfl.Fit:
    return fit(fedsvi(regression), federation(), rounds=2)


@cache
def of_binary() -> hierfl.Fit:
    """A fit of binary labels."""
    return fit(fedsvi(logistic), federation(), rounds=2)


def with_features() -> ClientData:
    """Clients whose field x names its columns."""
    data = federation()
    features = {"x": ("age", "dose")}
    return ClientData(data.fields, data.offsets, data.names, data.client_fields, features)
