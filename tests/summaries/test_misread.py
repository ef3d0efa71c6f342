"""Clients test on their own rows what was read of the program on a few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData, full_batch, methods
from hierfl.program import read as reading_room
from hierfl.program.few_rows import double_precision, in_double
from hierfl.program.program import Program, ProgramError
from hierfl.summaries.packed_rows import misread, points_to_test
from hierfl.summaries.reading import read_likelihood, seen_line
from tests.summaries import programs
from tests.summaries.programs import packed_rows, people, program_of, years

# an effect, correlated ones, global parameters that are read, scales beside the predictor, no
# predictor, chained
TAKEN = ("spread_raw", "slopes_lkj_raw", "counts", "tails", "gumbel", "chained")


def flags(program: Program, data: ClientData) -> list[float]:
    """Return what each client says of a program."""
    line = seen_line(read_likelihood(program))
    with double_precision(), torch.no_grad(), pyro.validation_enabled(False):
        batch = in_double(full_batch(data))
        return misread(packed_rows(line, batch), batch, points_to_test(line.reading)).tolist()


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_read_rightly_is_found_right(name: str) -> None:
    data = people()
    assert flags(program_of(getattr(programs, name)), data) == [0.0] * 4


def of_years() -> ClientData:
    """Return clients whose first rows are all of one year."""
    year = torch.arange(4).repeat_interleave(6).repeat(4)
    g = torch.Generator().manual_seed(0)
    return ClientData.from_arrays(
        torch.arange(4).repeat_interleave(24), year=year, y=torch.randn(96, generator=g)
    )


def test_what_is_read_wrongly_is_found_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the range of the codes, the effect of the first year is taken for the client's own."""
    data = of_years()
    blind: Any = replace(program_of(years, data), codes={})
    assert flags(blind, data) == [1.0] * 4
    assert flags(program_of(years, data), data) == [0.0] * 4
    monkeypatch.setattr(reading_room, "codes_of", lambda data: {})
    with pytest.raises(
        ProgramError, match=r"two_stage would be wrong: use hierfl\.methods\.fedsvi"
    ):
        hierfl.fit(methods.two_stage(years, draws=100), data, progress=False)


def table(batch: ClientBatch) -> None:
    scale = pyro.sample("scale", dist.Exponential(1.0))
    with pyro.plate_stack("cells", (3, 3)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(0.0, 1.0))
        with batch.data():
            loc = own + scale * z[batch.one, batch.other]
            pyro.sample("y", dist.Normal(loc, 0.7), obs=batch.y)


def test_entries_that_few_rows_do_not_pick_are_as_those_they_pick() -> None:
    """By their slope of 0 at any scale they would be taken for linear, and the others for not."""
    g = torch.Generator().manual_seed(0)
    one, other = (torch.randint(3, (48,), generator=g) for _ in range(2))
    y = torch.randn(48, generator=g)
    client = torch.arange(4).repeat_interleave(12)
    data = ClientData.from_arrays(client, one=one, other=other, y=y)
    program = program_of(table, data)
    assert seen_line(read_likelihood(program)).inside.tolist() == [0]
    assert flags(program, data) == [0.0] * 4
