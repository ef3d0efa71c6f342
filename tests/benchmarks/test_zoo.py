"""The zoo: every program is read, and the comparison with NUTS finds what is off."""

import numpy as np
import pytest
import torch

from benchmarks.zoo.__main__ import COLUMNS, NAMES, apart, fitted, kept_answers, row_of
from benchmarks.zoo.reading import data_of, program_of
from hierfl.program.read import read_model


@pytest.mark.parametrize("name", NAMES)
def test_programs_are_read(name: str) -> None:
    program = program_of(name)
    assert program.SOURCE
    latents = read_model(program.model, data_of(program)).program.latents
    assert latents.sites


# a program for each way in which rows, local sites and priors differ
RIGHT = (
    *("birats", "blocker", "cafes", "diets", "epil", "fishing", "hearts", "irt_2pl", "jaws"),
    *("kidney", "litter_bb", "mice", "orange", "poisson_lognormal", "pumps", "robust", "salm"),
    *("seeds", "student_effects", "surgical", "titanic", "waffles", "wells"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_posteriors_are_those_of_nuts(name: str) -> None:
    torch.set_default_dtype(torch.float32)  # as users have it
    row = row_of(name, fitted(name), kept_answers()[name])
    assert dict(zip(COLUMNS, row, strict=True))["right"] == "yes", row


def test_the_number_furthest_from_nuts_is_shown() -> None:
    nuts = {"a": {"mean": [0.0, 1.0], "sd": [1.0, 2.0]}, "b": {"mean": [3.0], "sd": [0.5]}}
    fit = {"a": {"mean": [0.1, 2.0], "sd": [1.0, 2.2]}, "b": {"mean": [3.0], "sd": [0.4]}}
    away = apart(fit, nuts)
    assert (away.mean_site, away.ratio_site) == ("a", "b")
    np.testing.assert_allclose([away.mean, away.ratio], [0.5, 0.8])
    record = {
        "seconds": 1.0,
        "chosen": "two_stage, since",
        "rounds": 3,
        "verdict": "Trustworthy. x",
    }
    row = row_of("pumps", {**record, "sites": fit}, {"seconds": 9.0, "sites": nuts})
    assert dict(zip(COLUMNS, row, strict=True))["right"] == "no"
    assert row_of("pumps", {**record, "sites": nuts}, {"seconds": 9.0, "sites": nuts})[8] == "yes"
    assert row_of("pumps", {"seconds": 1.0, "verdict": "ProgramError: y"}, None)[8:] == [
        "no",
        "ProgramError: y",
    ]
