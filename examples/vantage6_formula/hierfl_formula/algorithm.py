"""A Bayesian mixed model over the organizations of a vantage6 collaboration, from one line of text.

`central` is the server of a fit: it has no row. For each request it starts one task `partial` at each
organization, whose answer is one of `hierfl.nodes.station`: the node's policy decides what leaves, and its
log says what left. Requests and answers are base64 in JSON; nothing is pickled.
"""

from __future__ import annotations

import base64
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any

import pandas as pd
import pyro.distributions as dist
import torch
from vantage6.algorithm.client import AlgorithmClient
from vantage6.algorithm.tools.decorators import algorithm_client, data
from vantage6.algorithm.tools.util import info

import hierfl
from hierfl.nodes import Answer, Reached, over, station
from hierfl.nodes.policy import KEYS

torch.set_default_dtype(torch.float64)  # at the server and at every node
LISTS = ("methods", "discloses", "may_leave", "formulas", "columns", "transforms")
PRIORS = "Normal HalfNormal StudentT Cauchy HalfCauchy Exponential Gamma Beta".split()
# HIERFL_* in a node's environment (`algorithm_env` in its configuration) are keys of its policy, but for what
# vantage6 sets of a database `hierfl`, and what hierfl's own tests do
OTHERS = {"HIERFL_DATABASE_URI", "HIERFL_DATABASE_TYPE", "HIERFL_DATA", "HIERFL_SLOW"}
LONGEST = 100_000_000  # characters of a request or an answer
SOON = 5.0  # seconds to fetch a result that is there


@algorithm_client
def central(
    client: AlgorithmClient,
    formula: str,
    clients: str,
    family: str = "gaussian",
    priors: Mapping[str, Sequence[Any]] | None = None,
    missing: str = "refuse",
    rounds: int | None = None,
    seed: int = 0,
    fewest: int = 1,
    draws: int = 1000,
    organizations: Sequence[int] | None = None,
    timeout: float = 86400.0,
) -> dict[str, Any]:
    """Fit a formula to the rows of several organizations, each of which is one client.

    Args:
        client: what vantage6 gives to the container.
        formula: "y ~ x + (1 + x | hospital)".
        clients: the column that names the clients, here "hospital". Organizations whose rows have no
            such column are named as in vantage6.
        family: of the response, such as "bernoulli".
        priors: parameter -> distribution and its numbers, {"x": ["Normal", 0, 2.5]}. Default: those of
            `hierfl.formula`.
        missing: "refuse" rows with missing values, or "drop" them.
        rounds: at most. Default None, or 0: until the method stops.
        seed: of everything random.
        fewest: organizations that a round needs; others that fail are left out, and named.
        draws: of the posterior, from which the summary is made.
        organizations: their ids. Default None: all of the collaboration.
        timeout: seconds to wait for the answers to one request. Default: a day.

    Returns:
        The method and why it was chosen, the clients, a line for each round, and for each global
        parameter mean, sd and the quantiles of 5, 50 and 95%.

    Raises:
        ValueError: the formula, its family or a prior cannot be read; the message says why.
        TooFewNodes: fewer than `fewest` organizations can take part.
    """
    asked = {"formula": formula, "clients": clients, "family": family}
    asked |= {"priors": priors, "missing": missing}
    wanted = organizations or [one["id"] for one in client.organization.list()]
    nodes = _nodes(client, wanted, asked, fewest, timeout)
    fit = hierfl.nodes.fit(_model(**asked), nodes, rounds=rounds or None, seed=seed)
    history = fit.history[["round", "clients", "seconds"]].to_dict("records")
    return {
        "chosen": fit.chosen,
        "clients": list(fit.clients),
        "left_out": [one for record in fit.history.get("left_out", []) for one in record],
        "rounds": [{name: float(value) for name, value in record.items()} for record in history],
        "summary": _summary(fit.posterior(draws=draws, seed=seed)["posterior"]),
    }


def _nodes(
    client: AlgorithmClient,
    wanted: Sequence[int],
    asked: Mapping[str, Any],
    fewest: int,
    timeout: float,
) -> Reached:
    """Return the organizations as nodes, each of which answers a request by a task `partial`."""

    def ask(requests: Mapping[str, bytes]) -> Iterator[Answer]:
        tasks = {}
        for name, request in requests.items():
            sent = {"method": "partial", "kwargs": {**asked, "request": _text(request)}}
            try:
                here = {"organizations": [int(name)], "name": "hierfl request"}
                tasks[name] = client.task.create(input_=sent, **here)["id"]
            except Exception as error:  # it may have left, or lack a key of its own
                yield Answer(name, None, f"no task can be made for it ({type(error).__name__})")
        until = monotonic() + timeout
        for name, task in tasks.items():
            try:
                yield Answer(name, _bytes(_result(client, task, max(SOON, until - monotonic()))))
            except Empty:
                yield Answer(name, None, f"its task {task} gave no answer within {timeout:g} s")
            except Exception as error:  # whatever vantage6, or another's algorithm, sends back
                yield Answer(name, None, f"its task {task} gave no answer ({type(error).__name__})")

    return replace(over(ask, [str(one) for one in wanted], fewest=fewest), send_end=False)


def _result(client: AlgorithmClient, task: int, seconds: float) -> Any:
    """Return what one organization's task gave; raise Empty after some seconds: vantage6 itself waits without end."""
    results = SimpleQueue[Any]()

    def wait() -> None:
        try:
            results.put(client.wait_for_results(task_id=task, interval=0.5))
        except Exception as error:
            results.put(error)

    Thread(target=wait, daemon=True).start()
    found = results.get(timeout=seconds)
    if isinstance(found, Exception):
        raise found
    (only,) = found
    return only


@data(1)
@algorithm_client
def partial(
    client: AlgorithmClient,
    frame: pd.DataFrame,
    formula: str,
    clients: str,
    family: str,
    priors: Mapping[str, Sequence[Any]] | None,
    missing: str,
    request: str,
) -> str:
    """Answer one request about the rows of this organization; arguments as for `central`.

    Args:
        client: what vantage6 gives to the container.
        frame: the rows of the node's database.
        formula: as for `central`, and so the next four.
        clients: see there.
        family: see there.
        priors: see there.
        missing: see there.
        request: base64 of the request's bytes.

    Returns:
        Base64 of the answer's bytes: what the node's policy lets leave, or a fixed text.
    """
    model = _model(formula, clients, family, priors, missing)
    rows: Any = frame
    if clients not in frame.columns:
        rows = {str(client.organization.get(client.organization_id)["name"]): frame}
    folder = _folder() / f"organization-{client.organization_id}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    here = station(model, rows, folder, policy=_policy(folder), brought=True)
    with warnings.catch_warnings():  # one may name a value, and vantage6 sends what is printed
        warnings.simplefilter("ignore")
        by = f"vantage6 collaboration {client.collaboration_id}"
        answer = here.answer(_bytes(request), by=by)
    info(
        f"hierfl: {len(answer):,} bytes leave this node; {folder / 'left.jsonl'} says what they are"
    )
    return _text(answer)


def _model(
    formula: str,
    clients: str,
    family: str,
    priors: Mapping[str, Sequence[Any]] | None,
    missing: str,
) -> Any:
    made = {name: _prior(name, said) for name, said in (priors or {}).items()}
    return hierfl.formula(
        formula, family=family, clients=clients, priors=made or None, missing=missing
    )


def _prior(name: str, said: Sequence[Any]) -> Any:
    """Return the distribution of ["Normal", 0, 2.5]: of a few by name, with numbers alone."""
    kind, *numbers = said
    right = all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers)
    if kind not in PRIORS or not right:
        raise ValueError(
            f"the prior of '{name}' is {str(said)[:80]}: write one of {', '.join(PRIORS)} with its "
            'numbers, ["Normal", 0, 2.5]'
        )
    return getattr(dist, kind)(*map(float, numbers))


def _folder() -> Path:
    """Return the node's private folder: its folder database `hierfl`, else vantage6's volume of the job."""
    return Path(os.environ.get("HIERFL_DATABASE_URI") or os.environ["TEMPORARY_FOLDER"])


def _policy(folder: Path) -> Path | None:
    """Write the policy that the node's environment holds; None: it holds none, and policy.toml counts.

    A variable that is no key of a policy is written too, so that the node refuses to answer.
    """
    own = sorted(filter(_is_meant, os.environ.keys() - OTHERS))
    if not own:
        return None
    path = folder / "environment.toml"
    # in two spellings, a key is there twice, which no reader of TOML takes
    keys = [(name.removeprefix("HIERFL_").lower(), os.environ[name]) for name in own]
    lines = (f"{json.dumps(key)} = {_value(key, said)}\n" for key, said in keys)
    path.write_text("".join(lines))
    return path


def _is_meant(name: str) -> bool:
    """Return whether a variable may be meant for hierfl: HIERFL_MIN_COUNT, or nearly so, or nearly its folder's."""
    words, keys = name.upper().split("_"), (*KEYS, "database_uri")
    ends = [("_".join(words[:k]), "_".join(words[k:]).lower()) for k in range(1, len(words))]
    return name.upper().startswith("HIERFL") or any(
        SequenceMatcher(None, prefix, "HIERFL").ratio() > 0.75
        and get_close_matches(key, keys, cutoff=0.75)
        for prefix, key in ends
    )


def _value(key: str, said: str) -> str:
    """Return a value as TOML: a number, a text, or a list, "a, b"; formulas are on lines of their own."""
    if key in LISTS:
        parts = said.split("\n" if key == "formulas" else ",")
        return json.dumps([part.strip() for part in parts if part.strip()])
    try:
        return f"{float(said)}" if "." in said or "e" in said else f"{int(said)}"
    except ValueError:
        return json.dumps(said)


def _summary(posterior: Any) -> list[dict[str, Any]]:
    """Return a line for each global parameter."""
    found = []
    for name, draws in posterior.data_vars.items():
        flat = draws.stack(sample=("chain", "draw")).values.reshape(
            -1, draws.shape[0] * draws.shape[1]
        )
        for place, values in enumerate(flat):
            series = pd.Series(values)
            label = name if len(flat) == 1 else f"{name}[{place}]"
            quantiles = {f"{q:.0%}": float(series.quantile(q)) for q in (0.05, 0.5, 0.95)}
            line = {"mean": float(series.mean()), "sd": float(series.std()), **quantiles}
            found.append({"parameter": label, **line})
    return found


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(found: Any) -> bytes:
    """Return the bytes of a base64 text; of anything else none, which hierfl refuses on both sides."""
    if not isinstance(found, str) or len(found) > LONGEST:
        return b""
    try:
        return base64.b64decode(found, validate=True)
    except ValueError:
        return b""
