"""Reading a program once in the tests of a file: it is a function of a model, a guide, rows and a seed.

That it is one is what tests/program checks, where each test reads its own programs.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import fields
from types import FunctionType
from typing import Any

import numpy as np
import torch

from hierfl import Program
from hierfl.program.fingerprints import fingerprint
from hierfl.program.recipes import describe
from hierfl.program.sites import recipe_of

Programs = dict[Any, tuple[Program, Any, Any]]  # with what a key holds the ids of


def content(value: Any) -> Any:
    """Return something that is equal for equal rows, and can be a key."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return tuple((name, content(v)) for name, v in value.items())
    return repr(value)


def identity(value: Any) -> str | int:
    """Return how a model or a guide is made, with its weights, or which function it is."""
    if isinstance(value, FunctionType) and recipe_of(value) is None:
        return id(value)
    return json.dumps([describe(value), fingerprint(value, fixed=True)])


def once(read: Callable[..., Program], programs: Programs) -> Callable[..., Program]:
    """Return `read`, which takes from `programs` what it has read before without a warning."""

    def reading(model: Any, guide: Any, data: Any, **how: Any) -> Program:
        try:
            rows = tuple(content(getattr(data, of.name)) for of in fields(data))
            program = identity(model), identity(guide)
        except (TypeError, LookupError):  # no rows, or rows that were not saved
            return read(model, guide, data, **how)
        key = program, rows, torch.get_default_dtype(), repr(how)
        if key not in programs:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                found = read(model, guide, data, **how)
            for of in heard:
                warnings.warn_explicit(of.message, of.category, of.filename, of.lineno)
            if heard:
                return found
            programs[key] = found, model, guide
        return programs[key][0]

    return reading
