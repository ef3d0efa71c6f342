"""Every method over nodes gives the numbers of the vectorized engine, and client states stay at the nodes."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import Fit, methods, models
from hierfl.core.trees import named_leaves
from hierfl.engine.chunks import counted
from hierfl.nodes.client_state import kept
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.messages import Answer
from hierfl.nodes.run import fit_nodes
from tests.methods.cases import METHODS, cohort
from tests.nodes.one_process import Machines, machines
from tests.programs import federation, fit
from tests.sampled import sampled

# two_stage: below; differentially_private draws noise from the operating system
EACH = {
    name: make
    for name, make in METHODS.items()
    if name not in ("two_stage", "differentially_private")
}
EACH["fedsvi"] = METHODS["fedsvi structured"]
FEW = ("fedsvi mean_field", "fedfomo", "fedmap newton", "scaffold")


def same(over: FitOverNodes, here: Fit, around: Machines) -> None:
    there = named_leaves(over.progress.server)
    for name, value in named_leaves(here.progress.server).items():
        torch.testing.assert_close(there[name], value, rtol=0.0, atol=1e-9, equal_nan=True)
    table = named_leaves(here.progress.table)
    for position, client in enumerate(here.clients):
        for name, value in named_leaves(kept(around.nodes[client]).after).items():
            # the last mail has not been sent yet, and a node finds statistics when it is asked
            if ".mail" not in name and "statistics." not in name:
                torch.testing.assert_close(
                    value, table[name][position], rtol=0.0, atol=1e-9, equal_nan=True
                )
    for column in ("elbo", "loss"):
        if column in here.history:
            assert over.history[column].tolist() == pytest.approx(here.history[column].tolist())


@pytest.mark.slow("fedmap newton")
@pytest.mark.parametrize("name", sampled(EACH, FEW))
@pytest.mark.filterwarnings("ignore:too few rows at 'west'")  # of batch_normed
def test_nodes_give_the_numbers_of_the_vectorized_engine(name: str, tmp_path: Path) -> None:
    data = federation((5, 3, 7, 1))
    method, data = EACH[name](), data.select(sorted(data.names))  # as nodes are
    size = cohort(method, 3)
    around = machines(method, data, tmp_path, seed=4, policy="min_count = 1")  # of mini-batches too
    over = fit_nodes(
        method,
        around.agreement,
        around.ask,
        rounds=3,
        seed=4,
        cohort=size,
        starts=around.starts(),
    )
    same(over, fit(method, data, rounds=3, seed=4, cohort=size), around)
    assert len(around.sent) == sum(over.history["clients"])


@pytest.mark.slow
def test_two_stage_over_nodes_is_two_stage(tmp_path: Path) -> None:
    data = hierfl.datasets.heart_disease()
    method = methods.two_stage(
        models.regression("bernoulli", prior_scale=dist.HalfNormal(0.5), centered=True), draws=500
    )
    around = machines(method, data, tmp_path)
    over = fit_nodes(method, around.agreement, around.ask, starts=around.starts())
    here = hierfl.fit(method, data, settings=hierfl.Settings(compile=False))
    assert over.progress.round == here.progress.round
    same(over, here, around)
    found: Any = over.posterior(200, seed=3)
    expected: Any = here.posterior(200, seed=3, correct=None)
    assert len(found.posterior.data_vars) > 1
    for name, values in found.posterior.data_vars.items():
        np.testing.assert_allclose(values, expected.posterior[name], atol=1e-9)


@pytest.mark.slow("fedmap newton")
@pytest.mark.parametrize("name", ["fedfomo", "fedmap newton"])
def test_answers_summed_as_they_come_in_give_the_same_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums, log weights and reports of single clients, in groups of two in another order."""
    data = federation((5, 3, 7, 1, 4))
    method, data = EACH[name](), data.select(sorted(data.names))
    found, groups = {}, []

    def counting(federation: Any, task: Any, *rest: Any) -> Any:
        groups.append(len(task.ids))
        return counted(federation, task, *rest)

    monkeypatch.setattr("hierfl.nodes.run.counted", counting)
    for most in (1 << 20, 2):
        monkeypatch.setattr("hierfl.nodes.run.AT_ONCE", most)
        around = machines(method, data, tmp_path / str(most), seed=4, policy="min_count = 1")

        def ask(contents: Mapping[str, bytes], around: Machines = around) -> Iterable[Answer]:
            yield from around.ask({client: contents[client] for client in sorted(contents)[::-1]})

        fitted = fit_nodes(method, around.agreement, ask, rounds=2, seed=4, fewest=5)
        found[most] = named_leaves(fitted.progress.server)
    assert groups == [5, 5, *(2, 2, 1) * 2]
    for path, value in found[2].items():
        torch.testing.assert_close(value, found[1 << 20][path], rtol=0.0, atol=1e-12)
