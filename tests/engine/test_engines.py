"""The same numbers from every engine, in any order of clients and with any number of threads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from torch import Tensor

import hierfl
from hierfl import ClientBatch, Fit, full_batch, guides
from hierfl.core import noise
from hierfl.core.trees import named_leaves
from hierfl.engine.federation import federate
from hierfl.engine.rounds import adapt
from hierfl.optimizers import SGD
from hierfl.program.program import stacked
from tests.methods.cases import HARD, METHODS, QUICK, cohort, one_of_each
from tests.programs import FAMILIES, alone, federation, fit, read, regression
from tests.sampled import sampled
from tests.summaries import programs
from tests.summaries.programs import people

WAYS: dict[str, dict[str, Any]] = {
    "in chunks": {"chunk": 2},
    "sequential": {"engine": "sequential"},
    "pooled": {"engine": "pooled"},
}


def state_of(fitted: Fit) -> dict[str, Tensor]:
    """Return all state of a run, the rows of clients in the order of their names."""
    order = fitted.federation.data.by_name
    local = {f"local {k}": v[order] for k, v in named_leaves(fitted.progress.table).items()}
    if fitted.federation.server.mail is not None:
        return local  # a server with mail keeps a row a client, in the order of the data
    return {**local, **{f"global {k}": v for k, v in named_leaves(fitted.progress.server).items()}}


def assert_same(one: Fit, two: Fit, *, atol: float = 1e-10) -> None:
    a, b = state_of(one), state_of(two)
    assert a.keys() == b.keys()
    assert any(bool((v != 0).any()) for v in a.values())
    for name, value in a.items():
        far = (value - b[name]).abs().max()
        assert torch.allclose(value, b[name], rtol=0.0, atol=atol, equal_nan=True), (name, far)
    for column in {"elbo", "loss", "log_marginal", "moved"} & {*one.history}:
        there = pytest.approx(two.history[column].tolist(), abs=100 * atol, nan_ok=True)
        assert one.history[column].tolist() == there


@pytest.mark.parametrize("family", sampled(FAMILIES, 2))
def test_every_guide_on_every_engine(family: str) -> None:
    method, data = hierfl.methods.fedsvi(regression, FAMILIES[family]), federation()
    together = fit(method, data, rounds=2, seed=4)
    for how in WAYS.values():
        assert_same(together, fit(method, data, rounds=2, seed=4, **how))


@pytest.mark.slow("amortized")
@pytest.mark.parametrize(
    "family",
    sampled([name for name in FAMILIES if name != "conditional"], ("mean_field", "amortized")),
)
def test_mini_batches_local_steps_particles_and_cohorts(family: str) -> None:
    steps: dict[str, Any] = {"batch_size": 2, "local_steps": 1, "global_steps": 2, "draws": 2}
    method = hierfl.methods.fedsvi(
        regression, FAMILIES[family], global_optimizer=SGD(0.01), **steps
    )
    data, run = federation((5, 3, 7, 1, 2)), {"rounds": 2, "seed": 4, "cohort": 3}
    together = fit(method, data, **run)
    for way in ("in chunks", "sequential"):
        assert_same(together, fit(method, data, **run, **WAYS[way]))
    assert set(together.history["clients"]) == {3}


@pytest.mark.slow("conditional")
@pytest.mark.parametrize("family", ["structured", "conditional", "mean_field"])
def test_particles_are_pooled_too(family: str) -> None:
    method, data = (hierfl.methods.fedsvi(regression, FAMILIES[family], draws=3), federation())
    assert_same(fit(method, data, rounds=2), fit(method, data, rounds=2, engine="pooled"))


# one client after another: a loop that is the same for every method
ONE_BY_ONE = METHODS if os.environ.get("HIERFL_SLOW") else sorted(QUICK)[::6]


@pytest.mark.slow("pvi renyi", "pfedbred", "pfedbayes", "fedmap", "averaging_some")
@pytest.mark.parametrize("name", one_of_each(METHODS))
def test_every_method_in_every_way(name: str) -> None:
    """In chunks of clients in another order; and of some methods one client after another."""
    few = name in HARD or "pvi" in name
    one_row = 2 if name in ("batch_normed", "fedbn") else 1  # a batch norm needs two rows
    data = federation((5, 3, 2) if few else (5, 3, 7, one_row, 2))
    method = METHODS[name]()
    run: dict[str, Any] = {"rounds": 2, "seed": 4}
    run["cohort"] = cohort(method, 2 if few else 4)
    together = fit(method, data, **run)
    if name in ONE_BY_ONE:
        assert_same(together, fit(METHODS[name](), data, **run, engine="sequential"))
    back = fit(METHODS[name](), data.select(data.names[::-1]), **run, chunk=2)
    assert_same(together, back)
    if name.startswith("clustered_fl"):
        assert together.history["clusters"].iloc[-1] > 1.0
    if together.program.latents.sites:
        there, here = (f.draws(5).own for f in (together, back))
        for site, value in there.items():
            assert torch.allclose(value, here[site].flip(1), atol=1e-10)


def test_results_depend_on_names_and_seeds() -> None:
    data = federation()
    method = hierfl.methods.fedsvi(regression)
    one, other = fit(method, data, rounds=2, seed=1), fit(method, data, rounds=2, seed=2)
    renamed = fit(method, replace(data, names=tuple("abcd")), rounds=2, seed=1)
    loc, *others = (f.message["params"]["_shared.loc"] for f in (one, other, renamed))
    assert not any(torch.equal(loc, value) for value in others)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def test_threads_are_irrelevant() -> None:
    fits = []
    for count in (1, 2):
        with threads(count):
            method = hierfl.methods.fedsvi(regression)
            fits.append(fit(method, federation((400, 300, 700)), rounds=3))
    assert_same(*fits, atol=1e-12)


class Noisy(Messenger):
    """Draws Normal sites, with gradients, from given noise; written independently of hierfl's handler."""

    def __init__(self, eps: dict[str, Tensor]) -> None:
        super().__init__()
        self.eps = eps

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        if msg["name"] in self.eps and not msg["done"]:  # sites that the model replays are done
            base = msg["fn"]
            while hasattr(base, "base_dist"):
                base = base.base_dist
            value = base.loc + base.scale * self.eps[msg["name"]]
            msg["value"], msg["done"] = (value.exp() if msg["name"] == "spread" else value), True


@pytest.mark.parametrize("engine", ["vectorized", "sequential", "pooled"])
def test_a_synchronous_step_is_a_pooled_step_of_pyro(engine: str) -> None:
    """One round of plain SGD against pyro.infer.SVI with torch's SGD, on the same noise for each site."""
    lr, seed, data = 0.01, 5, federation()
    pace: dict[str, Any] = {"optimizer": SGD(lr), "local_optimizer": SGD(lr), "average": 0.0}
    method = hierfl.methods.fedsvi(regression, guides.mean_field, schedule="constant", **pace)
    fitted = fit(method, data, rounds=1, seed=seed, engine=engine)

    program = read(regression, guides.mean_field, data, seed=seed)
    at = (0, 1, 0)  # round 0, phase 1 of joint steps, step 0
    batch = full_batch(data, torch.arange(4), seed=seed, at=at)
    shapes = {"loc": (2,), "spread": (), "lift": ()}
    eps = {
        n: noise.normals(noise.fold(batch.shared_key, noise.word(n)), s) for n, s in shapes.items()
    }
    eps["slope"] = noise.normals(noise.fold(batch.key, noise.word("slope")), (1, 2))
    with Noisy(eps):  # Pyro allows each plate once a trace, so model and guide get a batch each
        svi = SVI(
            lambda b: program.model(replace(b)),
            lambda b: program.guide(replace(b)),
            pyro.optim.PyroOptim(torch.optim.SGD, {"lr": lr}),
            TraceMeanField_ELBO(),
        )
        loss = svi.step(batch)
    after = {name: value.detach() for name, value in pyro.get_param_store().named_parameters()}
    pyro.clear_param_store()

    ours = {**fitted.message["params"], **stacked(program, fitted.progress.table.at.params)}
    start = program.start()
    moved = {**start[0], **start[1]}
    assert ours.keys() == after.keys()
    for name, value in after.items():
        assert torch.allclose(ours[name], value, rtol=0.0, atol=1e-13), name
        assert float((value - moved[name]).abs().max()) > 1e-6, "the step moved it"
    assert fitted.history["elbo"][0] == pytest.approx(-loss, rel=1e-12)


def test_a_round_of_some_clients_is_an_unbiased_step() -> None:
    """The mean of the server's step over all cohorts of 2 is the step with all clients."""
    data, lr = federation(), 0.5
    method = hierfl.methods.fedsvi(
        regression, guides.delta, optimizer=SGD(lr), schedule="constant", average=0.0
    )
    start = read(regression, guides.delta, data).start()[0]
    whole = fit(method, data, rounds=1).message["params"]
    pairs = [(a, b) for a in range(4) for b in range(a)]
    by_pair: dict[tuple[int, ...], dict[str, Tensor]] = {}
    for seed in range(60):
        chosen = tuple(sorted(noise.cohort(seed, 0, 4, 2).tolist(), reverse=True))
        if chosen not in by_pair:
            by_pair[chosen] = fit(method, data, rounds=1, seed=seed, cohort=2).message["params"]
    assert set(by_pair) == set(pairs)
    for name, value in whole.items():
        mean = torch.stack([by_pair[p][name] for p in pairs]).mean(0)
        assert torch.allclose(mean - start[name], value - start[name], atol=1e-12)


def test_batches_of_a_program_are_plain_tensors() -> None:
    """A client's functions see one client, whichever others are in the chunk."""
    seen: list[tuple[int, ...]] = []

    def spied(batch: ClientBatch) -> None:
        seen.append((batch.num_clients, *tuple(batch.x.shape)))
        alone(batch)

    data = federation()
    read(spied, guides.delta, data)
    seen.clear()
    fit(hierfl.methods.fedsvi(spied, guides.delta), data, rounds=1)
    assert seen[-1] == (1, 1, 7, 2)


def test_clients_of_few_rows_are_one_chunk() -> None:
    """A method that asks for similar numbers of rows gets chunks by their size only where padding would cost."""
    few, many = (
        federate(hierfl.methods.fedlaplace(programs.spread), people(counts))
        for counts in ((1, 2, 4, 8), (1, 2, 400, 2000))
    )
    message = {"tril": torch.zeros(())}  # of the rounds for which fedlaplace asks for it
    assert [len(part) for part in few.parts(torch.arange(4), message)] == [4]
    assert [len(part) for part in many.parts(torch.arange(4), message)] == [1, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:the rounds ended")
def test_a_new_client_of_two_stage_takes_one_round() -> None:
    """More rounds would compute the same factor again."""
    fitted = fit(hierfl.methods.two_stage(programs.spread), people(), rounds=1)
    steps: list[None] = []
    phase = fitted.federation.client.phases[0]

    def step(*args: Any) -> Any:
        steps.append(None)
        return phase.step(*args)

    client = replace(fitted.federation.client, adapt=(replace(phase, step=step),))
    federation = replace(fitted.federation, client=client)
    adapt(federation, fitted.progress.server, 200)
    assert len(steps) == 1
