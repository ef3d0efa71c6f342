"""Every public answer of a fit, after it was saved and loaded: equal, or refused by `RowsNotSaved` without the rows."""

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, Fit, Program
from hierfl.core.trees import named_leaves
from hierfl.nodes.fit_over_nodes import FitOverNodes
from tests.methods.cases import METHODS
from tests.programs import federation, fit
from tests.sampled import sampled

# what they say of fewer sites, or with fewer columns, is what they said before
IN_PART = ("summary", "report", "profile", "diagnostics.summary")
MINUTES = ("diagnostics.against_nuts",)
QUICKLY = {"draws": 100, "count": 1, "rounds": 2}  # arguments of answers
EVERY = bool(os.environ.get("HIERFL_SLOW"))


class Asked(NamedTuple):
    """A fit and what is asked of it: parameter of an answer -> its argument."""

    fitted: Any
    arguments: Mapping[str, Any]


NO_ANSWERS = ("ask", "here", "progress", "federation", "method")


def answers(fitted: Any) -> dict[str, Callable[[Any], Any]]:
    """Return every public property, method and function of a fit."""
    functions: dict[str, Callable[[Any], Any]] = {}
    kind = type(fitted)
    for name in dir(fitted):
        if name.startswith("_") or name in NO_ANSWERS:
            continue
        if not callable(getattr(kind, name, None)):
            functions[name] = partial(lambda of, what: getattr(of, what), what=name)
        else:
            functions[name] = getattr(kind, name)
    if not isinstance(fitted, FitOverNodes):
        for prefix, module in (("", hierfl), ("diagnostics.", hierfl.diagnostics)):
            for name in module.__all__:
                function = getattr(module, name)
                takes = _first(function) if inspect.isfunction(function) else ""
                if takes in ("fit", "fits"):
                    functions[prefix + name] = function if takes == "fit" else _of_two(function)
    return functions


def _first(function: Callable[..., Any]) -> str:
    return next(iter(inspect.signature(function).parameters), "")


def _of_two(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a function of several fits says of a fit beside itself."""
    return wraps(function)(
        lambda fit, **options: function({"first": fit, "second": fit}, **options)
    )


def calls(answer: Callable[..., Any], asked: Asked, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each way in which a fit is asked: by default, of clients, by each choice."""
    if isinstance(answer, partial):
        yield {}
        return
    folder.mkdir(exist_ok=True)
    values = {**asked.arguments, "folder": folder / "saved", "path": folder / "report.html"}
    arguments: dict[str, Any] = {}
    clients: list[str | None] = [None]
    for name, parameter in list(inspect.signature(answer).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in QUICKLY and parameter.default != 0:
            arguments[name] = QUICKLY[name]
        elif name == "path" or parameter.default is parameter.empty:
            assert name in values, f"give {answer} an argument '{name}' in this test"
            arguments[name] = values[name]
        if name == "client" and parameter.default is not parameter.empty:
            clients = [None, "new", "each", values["client"]]
    for client in clients:
        yield arguments if client is None else {**arguments, "client": client}
    for name, value in choices(answer):
        yield {**arguments, name: value}


def choices(answer: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield each other value of the options that are switches or words from a list."""
    function: Any = inspect.unwrap(answer)
    for name, parameter in inspect.signature(answer).parameters.items():
        kind = parameter.annotation
        try:
            kind = eval(kind, dict(function.__globals__)) if isinstance(kind, str) else kind
        except (NameError, SyntaxError):  # a type for mypy alone, or none
            continue
        for part in (kind, *get_args(kind)):
            words = (True, False) if part is bool else get_args(part)
            if part is bool or get_origin(part) is Literal:
                yield from ((name, word) for word in words if word != parameter.default)


def outcome(answer: Callable[..., Any], fitted: Any, arguments: Mapping[str, Any]) -> Any:
    """Return what an answer holds, or the error that it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = answer(fitted, **arguments)
        except Exception as error:
            return error
    return contents(value)


def contents(value: Any) -> Any:
    """Return nested dicts of arrays and texts."""
    if isinstance(value, Fit | FitOverNodes):
        return {name: v.numpy() for name, v in named_leaves(value.message).items()}
    if isinstance(value, Program):
        return [site.name for site in value.latents.sites]
    if isinstance(value, ClientData):
        return list(value.names)
    if isinstance(value, Tensor):
        return value.detach().numpy()
    if isinstance(value, pd.DataFrame | pd.Series):
        return contents(value.reset_index().to_dict("list"))
    if hasattr(value, "data_vars"):
        return {name: np.asarray(v) for name, v in value.data_vars.items()}
    if hasattr(value, "groups") and not is_dataclass(value):
        groups = value.groups() if callable(value.groups) else value.groups
        return {
            group: contents(value[group].to_dataset() if group.startswith("/") else value[group])
            for group in groups
            if group != "/"
        }
    if is_dataclass(value):
        return {of.name: contents(getattr(value, of.name)) for of in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): contents(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [contents(v) for v in value]
    return value if isinstance(value, str | int | float | np.ndarray | None) else type(value)


def equal(before: Any, after: Any) -> bool:
    """Return whether two answers are the same: numbers, texts, or a refusal of the same kind."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(equal(before[k], after[k]) for k in before)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(equal, before, after))
    if isinstance(before, np.ndarray | float) and isinstance(after, np.ndarray | float):
        left, right = np.asarray(before), np.asarray(after)
        if left.dtype.kind not in "fc":
            return bool(np.array_equal(left, right))
        return left.shape == right.shape and bool(
            np.allclose(left, right, rtol=1e-9, atol=1e-12, equal_nan=True)
        )
    if isinstance(before, Exception):
        return type(before) is type(after)
    return bool(before == after)


def is_part(before: Any, after: Any) -> bool:
    """Return whether a table has the rows and numbers of another, or fewer; what is missing is NaN or left out."""
    if "frame" not in after:
        return True  # a report: it is asked what it warns of
    keys = [k for k in ("site", "entry", "client") if k in after["frame"]]
    old, new = (pd.DataFrame(of["frame"]).set_index(keys) for of in (before, after))
    if not set(new.index) <= set(old.index) or not set(new) <= set(old):
        return False
    told = " ".join(map(str, after.get("remarks", ())))
    for name in new.columns.drop("index", errors="ignore"):  # rows are counted in each table
        here, there = new[name], old.loc[new.index, name]
        if name.startswith("shrinkage"):  # of what is named
            unshrunk = told.partition("the shrinkage of ")[2]
            sites = here.index.get_level_values("site")
            there = there.mask(here.isna() & np.array([f"'{s}'" in unshrunk for s in sites]))
        if not equal(there.to_numpy(float), here.to_numpy(float)):
            return False
    missing = {key[0] for key in set(old.index) - set(new.index) if isinstance(key, tuple)}
    return all(f"'{site}'" in told for site in missing)


def check(before: Asked, folder: Path, **loaded: Any) -> dict[str, str]:
    """Return what is neither equal nor refused, by answer; `loaded` is the same fit with `rows` or without (`bare`)."""
    wrong = {}
    for name, answer in answers(before.fitted).items():
        for place, arguments in enumerate(calls(answer, before, folder / "a")):
            old, is_told = None, False
            for which, after in sorted(loaded.items()):
                # with rows what is not told without them; of all answers in the slow tests
                if which == "rows" and (name in MINUTES or (is_told and not EVERY)):
                    continue
                there = folder / f"{which}-{name}-{place}.html"
                later = {k: there if k in ("folder", "path") else v for k, v in arguments.items()}
                new = outcome(answer, after, later)
                if isinstance(new, hierfl.RowsNotSaved) and which == "bare":
                    assert "data=" in str(new)
                    continue
                old = outcome(answer, before.fitted, arguments) if old is None else old
                same = equal(_without_marks(old), _without_marks(new))
                if name == "compare_models" and which == "bare" and isinstance(new, dict):
                    same = equal(old["by_client"], new["by_client"])  # rows are not compared
                if not same and name in IN_PART and which == "bare" and isinstance(new, dict):
                    same = isinstance(old, dict) and is_part(old, new)
                    same = same and not (new.get("trustworthy") and not old["trustworthy"])
                is_told |= same
                if not same:
                    label = f"{which} {name}({arguments})"
                    wrong[label] = f"{_short(old)} became {_short(new)}"
    return wrong


def _without_marks(content: Any) -> Any:
    """Leave out where a file lies, and by which hash rows are recognized."""
    if not isinstance(content, dict):
        return content
    marks = ("path", "data") if "elpd" in content else ("path",)
    return {k: v for k, v in content.items() if k not in marks}


def _short(content: Any) -> str:
    return f"{type(content).__name__}: {str(content)[:300]}"


QUICK = ("fedsvi structured", "fedmap")


def of_method(name: str) -> Asked:
    data = federation()
    rows = federation(seed=9).select(["north", "south"])
    new = ClientData(rows.fields, rows.offsets, ("new", "newer"), rows.client_fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = fit(METHODS[name](), data, rounds=2, seed=3)
    arguments: dict[str, Any] = {"rows": rows, "data": new, "client": "north", "formula": "y ~ 1"}
    arguments |= {"variable": "x", "hypothesis": "loc = 0", "model": METHODS[name]().model}
    return Asked(fitted, arguments)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sampled(METHODS, QUICK))
def test_every_answer_of_every_method(name: str, tmp_path: Path) -> None:
    asked = of_method(name)
    loaded = {"rows": saved_and_loaded(asked, tmp_path, "rows", method=asked.fitted.method)}
    try:
        loaded["bare"] = saved_and_loaded(asked, tmp_path, "bare", method=asked.fitted.method)
    except hierfl.RowsNotSaved:
        assert name not in QUICK  # its program is made of rows
    assert not check(asked, tmp_path, **loaded)


def saved_and_loaded(asked: Asked, folder: Path, which: str, **of: Any) -> hierfl.Fit:
    asked.fitted.save(folder / f"run-{which}", with_data=which == "rows")
    return hierfl.load(folder / f"run-{which}", **of)


def frame() -> pd.DataFrame:
    g = np.random.default_rng(8)
    rows = pd.DataFrame({"h": np.resize(list("abcd"), 60), "x": g.normal(size=60)})
    eta = rows.h.map(dict(zip("abcd", [-1, 0.0, 1.0, 0.5], strict=True))) + rows.x
    rows["b"] = (g.random(60) < 1 / (1 + np.exp(-eta))).astype(int)
    rows["count"] = g.poisson(np.exp(0.5 + 0.5 * eta))
    rows["y"] = eta + g.normal(size=60)
    rows["time"] = g.exponential(np.exp(-eta / 3))
    rows["died"] = (g.random(60) < 0.7).astype(int)
    grades = ["low", "mid", "high"]
    codes = np.digitize(eta + g.logistic(size=60), [-0.7, 0.8])
    rows["grade"] = pd.Categorical.from_codes(codes, grades, ordered=True)
    return rows


FORMULAS = {
    "bernoulli": "b ~ x + (1 | h)",
    "poisson": "count ~ x + (x | h)",
    "gaussian": "y ~ x + (1 | h)",
    "weibull": "time | event(died) ~ x + (1 | h)",
    "cumulative": "grade ~ x + (1 | h)",
}


@hierfl.model
def own_intercepts(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("b", dist.Bernoulli(logits=own + beta * batch.x), obs=batch.b)


def of_frame(kind: str) -> Asked:
    rows: Any = frame()
    model: Any = own_intercepts
    arguments: dict[str, Any] = {"client": "a", "variable": "x", "formula": ". ~ .", "columns": {}}
    if kind == "program":
        rows = rows[["h", "x", "b"]]
        fitted = hierfl.fit(model, rows, clients="h", seed=0, progress=False)
    else:
        model = hierfl.formula(FORMULAS[kind], kind, clients="h")
        fitted = hierfl.fit(model, rows, seed=0, progress=False)
    arguments |= {"rows": rows.head(12), "data": rows.assign(h="z"), "model": model}
    hypotheses = {"program": "mu > 0", "poisson": "h[a, x] > x"}
    return Asked(fitted, arguments | {"hypothesis": hypotheses.get(kind, "h[a] > h[b]")})


def joined(fitted: Any, rows: pd.DataFrame) -> Any:
    """Return the fit with four more clients."""
    return fitted.updated(rows.assign(h=rows.h + "2").head(40))


HISTORIES: dict[str, Callable[[Any, pd.DataFrame], Any]] = {
    "fitted": lambda fitted, rows: fitted,
    "joined": joined,
    "left": lambda fitted, rows: joined(fitted, rows).without("b"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "history"),
    sampled(product([*FORMULAS, "program"], HISTORIES), [("poisson", "fitted")]),
)
def test_every_answer_of_a_fit_to_frames(kind: str, history: str, tmp_path: Path) -> None:
    asked = of_frame(kind)
    rows = asked.arguments["data"].assign(h=frame().h)
    asked = asked._replace(fitted=HISTORIES[history](asked.fitted, rows))
    bare = saved_and_loaded(asked, tmp_path, "bare")
    assert not check(asked, tmp_path, rows=saved_and_loaded(asked, tmp_path, "rows"), bare=bare)
    bare.posterior(20, var_names=["mu" if kind == "program" else "x"])  # what draws suffice for
    if kind != "program":  # and draws with a schema
        bare.effects("x")
        bare.comparisons("x")
        bare.hypotheses("x > 0")


@pytest.mark.filterwarnings("ignore")
def test_rows_without_labels_are_predicted_as_before(tmp_path: Path) -> None:
    asked, unlabeled = of_frame("gaussian"), frame().drop(columns="y")
    bare = saved_and_loaded(asked, tmp_path, "bare")
    assert torch.equal(bare.predict(unlabeled).mean, asked.fitted.predict(unlabeled).mean)


@pytest.mark.filterwarnings("ignore")
def test_new_rows_of_all_clients_give_the_fit_to_them() -> None:
    """No client is left to carry over: torch ended it with 'max(): Expected reduction dim'."""
    fitted, other = of_frame("gaussian").fitted, frame().assign(y=frame().y - 0.5 * frame().x)
    fresh = hierfl.fit(hierfl.formula(FORMULAS["gaussian"], clients="h"), other, seed=0)
    ours, theirs = (of.draws(2000).shared["x"] for of in (fitted.updated(other), fresh))
    assert abs(ours.mean() - theirs.mean()) < 0.1 * theirs.std()
    with pytest.raises(ValueError, match="'two_stage' has weighted its draws"):
        hierfl.diagnostics.client_gradients(fitted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_fits_in_single_precision_are_loaded(tmp_path: Path) -> None:
    """As users have it: numbers that chains, or clients that join, give the server were of another dtype."""
    torch.set_default_dtype(torch.float32)
    fitted = of_frame("bernoulli").fitted
    assert fitted.progress.ended is not None  # by chains
    for name, history in HISTORIES.items():
        fit_ = history(fitted, frame())
        fit_.save(tmp_path / name, with_data=True)
        again = hierfl.load(tmp_path / name)
        assert equal(contents(fit_.summary().frame), contents(again.summary().frame))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_answer_of_a_fit_over_nodes(tmp_path: Path) -> None:
    formula = hierfl.formula(FORMULAS["bernoulli"], "bernoulli", clients="h")
    frames = {name: part.drop(columns="h") for name, part in frame().groupby("h")}
    nodes = hierfl.nodes.in_process(frames, tmp_path / "nodes")
    fitted = hierfl.nodes.fit(formula, nodes, seed=0)
    fitted.save(tmp_path / "run")
    arguments = {"client": "a", "variable": "x", "hypothesis": "x > 0", "nodes": nodes}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    again = hierfl.nodes.load(tmp_path / "run", nodes)
    assert not check(Asked(fitted, arguments), tmp_path, rows=again)
