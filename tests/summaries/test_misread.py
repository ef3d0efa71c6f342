"""Clients test on their own rows what was read of the program on a few."""

from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData, Program, ProgramError, full_batch, methods
from hierfl.core.process import double_precision
from hierfl.data.batch import in_double
from hierfl.methods.stages.checks import misread, points_to_test
from hierfl.methods.stages.exact import Chains
from hierfl.methods.stages.two_stage import seen_in, server_rounds
from hierfl.program import read as reading_room
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
    """Return clients of 24 rows; those in the prototype, 0, 5, 11, 17 and 23, are all of one year."""
    year = torch.tensor([0, 1, 2, 3, 3, 0]).repeat(16)
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


def bounded(batch: ClientBatch) -> None:
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with batch.data():
            eta = (a + b * batch.x).clamp(min=-40.0)
            pyro.sample("y", dist.Poisson(eta.exp()), obs=batch.y)


def far_rows() -> ClientData:
    """Return clients with a row each, not in the prototype, that lies far out: `bounded` may be at its bound."""
    x = torch.linspace(-1.0, 1.0, 32)
    x[8:12] = -100.0  # the third of a client's eight rows
    return ClientData.from_arrays(torch.arange(32) % 4, x=x, y=torch.arange(32) % 5 % 2 + 1.0)


@pytest.mark.filterwarnings("ignore:the last round")
@pytest.mark.filterwarnings("ignore:k-hat")
@pytest.mark.filterwarnings("ignore:.*rounds")
def test_a_bound_that_few_rows_do_not_reach_leaves_no_linear_predictor() -> None:
    data = far_rows()
    assert flags(program_of(bounded, data), data) == [1.0] * 4
    fit = hierfl.fit(methods.two_stage(bounded, draws=400), data, rounds=1, progress=False)
    assert fit.history["misread"].tolist() == [0.0]
    assert len(seen_in(fit.program).score.line.inside) == 0


def test_chains_rely_on_no_predictor_that_is_none_of_all_rows() -> None:
    data = far_rows()
    program = program_of(bounded, data)
    seen, rounds = seen_in(program), server_rounds(program, 100, None)
    assert seen.score.line.inside.tolist() == [0, 1]
    Chains(rounds, seen.score, seen.spread, full_batch(data), seed=0)
    assert len(seen.score.line.inside) == 0


def bent(batch: ClientBatch) -> None:
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    s = pyro.sample("s", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        knot = pyro.sample("knot", dist.Normal(5.0, 1.0))
        with batch.data():
            loc = a + b * (batch.x - knot).clamp(min=0.0)
            pyro.sample("y", dist.Normal(loc, s), obs=batch.y)


@pytest.mark.parametrize("last", [10.0, 4.0])
def test_a_bend_is_seen_where_a_client_s_first_rows_are_all_before_it(last: float) -> None:
    """Normal rows before their knot are linear, and would be sent as sums, which no later test takes back."""
    x = torch.linspace(0.0, last, 24).repeat(4)
    x[48:] = torch.linspace(0.0, 10.0, 24).repeat(2)
    data = ClientData.from_arrays(
        torch.arange(4).repeat_interleave(24), x=x, y=-(x - 5.0).clamp(min=0.0)
    )
    program = program_of(bent, data)
    assert flags(program, data) == [0.0] * 4
    assert seen_in(program).spread is None


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
