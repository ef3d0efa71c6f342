"""`fit(model, data)`: the rule of docs/methods.md, row by row; the choice is kept, and the same on resume."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import hierfl
from hierfl import ClientBatch, Fit, Method, ProgramError, methods, models
from hierfl.diagnostics.convergence import Convergence, convergence
from hierfl.guides import mean_field, structured
from hierfl.methods import fedsvi
from hierfl.nodes import in_process
from hierfl.program import read as read_module
from hierfl.program.recipes import describe
from hierfl.runs import checkpoint as state
from hierfl.runs import choice
from hierfl.runs import fit as chosen
from hierfl.runs.choice import choose
from hierfl.runs.ended import expected
from tests.formulas.frames import patients
from tests.programs import alone, federation, fit, learned, logistic, regression, same


def normal() -> Any:
    return models.likelihood.normal(1.0)


def net(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))


@hierfl.model(name="students of the choice")
def students(batch: ClientBatch) -> None:
    """Local sites whose prior reads rows, which two_stage refuses."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with batch.clients():
        w = pyro.sample("w", dist.StudentT(4.0, mean + batch.x[..., :1, 0], 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(w, 1.0), obs=batch.y)


def branching(batch: ClientBatch) -> None:
    """Python's `if` on a value, which neither two_stage nor fedlaplace can differentiate."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(mean, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(w if bool((w > 0).all()) else -w, 1.0), obs=batch.y)


def wide(batch: ClientBatch, *, own: int = 1, shared: int = 1) -> None:
    mean = pyro.sample("mean", dist.Normal(torch.zeros(shared), 1.0).to_event(1))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(torch.zeros(own), 1.0).to_event(1))
        with batch.data():
            center = w.mean(-1) + mean.mean()
            pyro.sample("y", dist.Normal(center.expand(batch.y.shape), 1.0), obs=batch.y)


def personal(batch: ClientBatch) -> None:
    with batch.clients():
        level = pyro.param("level", torch.zeros(batch.num_clients, 1))
        with batch.data():
            pyro.sample("y", dist.Normal(level, 1.0), obs=batch.y)


def network(**options: Any) -> Any:
    return models.bayesian_network(net(), likelihood=normal(), **options)


heads: dict[str, Any] = {"outputs": 1, "features": 7, "local_features": 2}
# a model, made under the test's dtype; its method, its guide if it is fedsvi, in the reason
ROWS: dict[str, tuple[Any, str, Any, str]] = {
    "few numbers": (lambda: regression, "two_stage", None, "reads only 2 parameters"),
    "a prior of rows": (lambda: students, "fedsvi", structured, "its prior reads the client's"),
    "a branch": (lambda: branching, "two_stage", None, "reads"),
    "nothing global": (lambda: alone, "two_stage", None, "is Gaussian in"),
    "v too long": (lambda: partial(wide, own=201), "fedsvi", structured, "parameters, too many"),
    "a long v of a Gaussian likelihood": (
        lambda: partial(wide, own=110), "two_stage", None, "only 110 parameters, and is Gaussian: one exact"
    ),
    "too many global": (lambda: partial(wide, shared=301), "fedsvi", structured, "301 global"),
    "very many": (lambda: partial(wide, shared=1000), "fedsvi", mean_field, "1,001 unknowns"),
    "a learned param": (lambda: learned, "fedsvi", structured, "param 'm' is learned"),
    "a Bayesian network": (
        lambda: network(prior_loc=dist.Normal(0.0, 1.0)), "fedsvi", mean_field, "a Bayesian network"
    ),
    "a learned prior": (lambda: network(prior_loc="learned"), "fedsvi", mean_field, "is a network"),
    "a network": (lambda: models.network(net(), likelihood=normal()), "fedavg", None, "no site is latent"),
    "params at clients": (lambda: personal, "fedper", None, "at each client"),
    "learned_prior_network": (
        lambda: models.learned_prior_network(net(), likelihood=normal()), "fedmap", None, "learned_prior"
    ),
    "bregman_network": (
        lambda: models.bregman_network(net(), models.bregman.gaussian(), likelihood=normal()), "pfedbred", None,
        "bregman_network"
    ),
    "heads": (
        lambda: models.PersonalHeads(nn.Linear(2, 7), likelihood=normal(), **heads), "fedvi", None, "PersonalHeads"
    ),
}  # fmt: skip


SUMS = hierfl.Settings(disclose="sums")
SKIP = hierfl.Settings(on_client_error="skip")
SUMS_AND_SKIP = hierfl.Settings(disclose="sums", on_client_error="skip")


@pytest.mark.slow(
    "a long v of a Gaussian likelihood",
    "few numbers",
    "v too long",
    "a prior of rows",
    "a branch",
    "too many global",
)
@pytest.mark.parametrize("row", ROWS)
def test_each_row_of_the_table(row: str) -> None:
    make, name, guide, why = ROWS[row]
    model = make()
    found = choose(model, federation())
    assert found.method.name == name
    assert guide is None or found.method.guide is guide
    assert why in found.why and found.why.startswith(f"{name}, since ") and "\n" not in found.why
    sums = choose(model, federation(), settings=SUMS).method
    assert sums.discloses == "sums"
    if name == "two_stage":
        # fedlaplace maps the program over points, which one that looks at its values does not stand;
        # without a global site there is nothing to send
        other = row in ("a branch", "nothing global")
        assert sums.name == ("fedsvi" if other else "fedlaplace")
    elif sums.name == name:
        assert describe(sums) == describe(found.method), "the choice is the same again"


def test_a_formula_of_too_many_coefficients_is_refused_with_sizes_that_fit() -> None:
    rows = np.arange(2200)
    frame = pd.DataFrame({"y": rows / 1e3, "s": rows % 2, "d": rows // 2})
    formula = hierfl.formula("y ~ 1 + (1 | d)", clients="s")
    with pytest.raises(ProgramError, match=r"'d' has 1,100 for all clients.* read up to 200 of"):
        hierfl.fit(formula, frame.astype({"d": str}))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"settings": SUMS}, "fedlaplace"),
        ({"settings": SUMS, "cohort": 2}, "fedsvi"),
        ({"cohort": 2}, "two_stage"),
        ({"settings": SUMS_AND_SKIP}, "fedsvi"),  # fedlaplace can leave no client out
        ({"settings": SKIP}, "two_stage"),
    ],
)
def test_sums_with_cohorts_leave_fedlaplace_out(options: dict[str, Any], name: str) -> None:
    found = choose(logistic, federation(), **options).method
    assert found.name == name and (name != "fedsvi" or found.guide is structured)


def test_sums_of_many_numbers_leave_fedlaplace_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "SLOW", 3)
    found = choose(logistic, federation(), settings=SUMS)
    assert found.method.name == "fedsvi" and "2 x 2 unknowns" in found.why


@pytest.mark.slow
def test_disclose_refuses_summaries_and_names_another_method() -> None:
    data = federation()
    for method, other in (
        (methods.two_stage(regression), "fedlaplace"),
        (methods.fine_tuned(methods.two_stage(regression), steps=1), "fedlaplace"),
    ):
        with pytest.raises(
            ValueError, match=rf"'{re.escape(method.name)}' shows .*methods\.{other}\(model\)"
        ):
            hierfl.fit(method, data, settings=hierfl.Settings(disclose="sums"))
    bfi = methods.bfi(logistic, steps=1)
    for method in (bfi, methods.pvi(logistic), methods.fedlaplace(logistic)):
        assert method.discloses == "sums"
    assert fit(bfi, data, disclose="sums").progress.round == 1
    any_word: Any = "nothing"
    with pytest.raises(
        ValueError, match="disclose is 'nothing': it must be one of 'summaries', 'sums'"
    ):
        hierfl.fit(bfi, data, settings=hierfl.Settings(disclose=any_word))


@pytest.mark.parametrize("wrap", [methods.by_rows, methods.fine_tuned, methods.over_relaxed])
def test_wrappers_keep_what_is_disclosed(wrap: Any) -> None:
    wrapped: Method = wrap(methods.two_stage(regression))
    assert wrapped.discloses == "summaries"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make attempts short, and good after the second; return the rounds that were judged."""
    judged: list[int] = []
    made: list[Convergence] = []  # one real answer, which the others copy

    def found(fitted: Fit, **options: Any) -> Convergence:
        judged.append(fitted.rounds)
        good = fitted.rounds >= 12
        none = made[0] if made else convergence(fitted, draws=0, proposals=100)
        made.append(none)
        answer = "good" if good else "not good"
        words = {"answer": answer, "verdict": f"{answer.capitalize()}."}
        weights = {"k_hat": 0.3, "effective": 500.0}
        return Convergence(**{**none.__dict__, **words, **weights})

    monkeypatch.setattr(chosen, "ATTEMPTS", (6, 12, 24))
    monkeypatch.setattr(chosen, "convergence", found)
    return judged


def test_attempts_get_longer_until_the_fit_is_good(quick: list[int]) -> None:
    found = fit(students, federation())
    assert quick == [6, 12] and found.rounds == found.progress.round == 12
    assert found.chosen is not None and found.chosen.startswith("fedsvi, since two_stage cannot")
    assert found.progress.verdict == "Good."
    same(found, fit(methods.fedsvi(students), federation(), rounds=12))


@pytest.mark.filterwarnings("ignore:do not trust the posterior")
def test_the_attempts_end(quick: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "ATTEMPTS", (2, 4))
    assert fit(students, federation()).rounds == 4
    assert quick == [2, 4]


def test_rounds_that_are_named_are_kept(quick: list[int]) -> None:
    found = fit(students, federation(), rounds=3)
    assert quick == [3] and found.progress.round == 3 and found.chosen is not None


@pytest.mark.slow("8")
@pytest.mark.parametrize("kill", [3, 8])  # in the first attempt, and in the second
def test_a_killed_run_chooses_the_same_and_goes_on(
    quick: list[int], kill: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = partial(fit, students, federation(), checkpoint=tmp_path, checkpoint_every=2)
    whole = fit(students, federation())
    write, left = state.save, [kill]

    def killed(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return write(*args, **options)

    monkeypatch.setattr(state, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.setattr(state, "save", write)
    again = run(resume=True)
    same(again, whole)
    assert again.chosen == whole.chosen and again.rounds == whole.rounds
    if kill == 8:
        same(run(resume=True), whole)
        same(hierfl.load(tmp_path, data=federation()), whole)
        with pytest.raises(
            hierfl.CheckpointError, match=r"fedsvi there, hierfl\.methods\.fedlaplace here"
        ):
            run(resume=True, disclose="sums")


@pytest.mark.filterwarnings("ignore:k-hat")  # 12 rounds make a poor guide
def test_a_chosen_fit_is_saved_and_loaded(quick: list[int], tmp_path: Path) -> None:
    found = fit(students, federation())
    found.save(tmp_path, with_data=True)
    again = hierfl.load(tmp_path)
    same(again, found)
    assert again.progress.verdict == found.progress.verdict
    assert again.progress.corrected == found.progress.corrected
    assert again.chosen == found.chosen
    assert f"Chosen: {found.chosen}."[:40] in repr(again)
    assert f"Chosen: {found.chosen}." in again.summary(draws=50).remarks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:k-hat")  # 12 rounds make a poor guide
def test_the_posterior_is_corrected_where_weights_allow(quick: list[int]) -> None:
    found = fit(students, federation())
    auto, plain, psis = (
        found.posterior(draws=50, correct=how)["posterior"]["mean"].values
        for how in ("auto", None, "psis")
    )
    assert (auto == psis).all() and (auto != plain).any()
    # the same draws everywhere
    table = found.summary(draws=50).frame.set_index("site")
    np.testing.assert_allclose(table.loc["mean", "mean"], auto.mean(), rtol=1e-5)
    np.testing.assert_allclose(found.draws(50).shared["mean"].mean(), auto.mean(), rtol=1e-5)
    assert "far from" not in found.summary(draws=50).verdict
    named = fit(methods.fedsvi(students), federation(), rounds=12)
    assert (named.posterior(draws=50)["posterior"]["mean"].values == plain).all()
    # the weights are those of the fitted clients
    new = found.personalize(federation((4, 2), seed=3), rounds=2)
    assert (new.posterior(draws=50)["posterior"]["mean"].values == plain).all()


@pytest.mark.filterwarnings("ignore:the rounds ended")
def test_a_method_that_stops_itself_is_chosen_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = fit(logistic, federation(), rounds=1, progress=True)
    assert found.method.name == "two_stage" and found.progress.round == 1
    shown = capsys.readouterr()
    said = shown.err + shown.out
    assert "hierfl.fit chose two_stage, since" in said
    assert re.search(r"4 clients, 16 rows: 1 round at most; about \d+ s", said)
    assert " s a round" in said
    most = methods.two_stage(logistic).most_rounds
    left = expected(methods.two_stage(logistic), federation(), None)
    assert left.endswith(f"rounds until it is done, {most} at most")
    usual = expected(methods.two_stage(logistic), federation(), None, 5)
    assert usual == f"4 clients, 16 rows: about 5 rounds, {most} at most"
    assert expected(methods.two_stage(logistic), federation(), None, 1).endswith(": one round")
    assert found.progress.verdict is None
    named = fit(methods.two_stage(logistic), federation(), rounds=1)
    assert named.chosen is None
    same(found, named)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the rounds ended")
def test_a_model_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By `fit` of a model, of a formula and of a method; over nodes by each party."""
    count, whole = [0], read_module._read_model

    def counted(*given: Any, **options: Any) -> Any:
        count[0] += 1
        return whole(*given, **options)

    def reads(work: Callable[[], object]) -> int:
        count[0] = 0
        work()
        return count[0]

    monkeypatch.setattr(read_module, "_read_model", counted)
    data = federation((3, 2))
    frame = patients(rows=20)
    formula = hierfl.formula("y ~ age + (1 | site)", clients="site")
    sums = hierfl.Settings(compile=False, disclose="sums")
    assert reads(lambda: fit(logistic, data, rounds=1)) == 1
    assert reads(lambda: hierfl.fit(logistic, data, rounds=1, settings=sums)) == 1
    assert reads(lambda: fit(fedsvi(logistic), data, rounds=1)) == 1
    assert reads(lambda: hierfl.fit(formula, frame, rounds=1, settings=sums)) == 1
    around = in_process(data, tmp_path)
    assert reads(lambda: hierfl.nodes.fit(logistic, around, rounds=1)) == 1 + data.num_clients


def test_a_likelihood_that_is_linear_far_out_has_curvature() -> None:
    """Of an age in years half a unit of its coefficient is half of 62 on the log scale."""
    g = np.random.default_rng(0)
    n = 200
    rows = pd.DataFrame({"hospital": g.choice(["a", "b", "c"], n), "age": g.normal(62.0, 9.0, n)})
    rows["arm"], rows["stage"] = g.choice(["new", "old"], n), g.choice(["I", "II", "III"], n)
    rows["days"] = (400.0 * g.weibull(1.2, n) * np.exp(0.02 * (62.0 - rows["age"]))).round() + 1.0
    rows["died"] = (rows["days"] < 600.0).astype(int)
    text = "days | event(died) ~ arm + age + stage + (1 | hospital)"
    made = hierfl.formula(text, "weibull", clients="hospital").on(rows)
    assert choose(made, made.data(rows)).method.name == "two_stage"
