"""The zoo: every program is read, and the comparison with NUTS finds what is off."""

import pytest
import torch

from benchmarks.zoo.__main__ import COLUMNS, NAMES, fitted, kept_answers, row_of
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
