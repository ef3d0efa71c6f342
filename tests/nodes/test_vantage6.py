"""The vantage6 algorithm of `examples/`, by vantage6's own mock: as here, and hostile tasks are refused.

The first part runs where vantage6-algorithm-tools is installed, which wants other versions than hierfl's tests.
"""

import base64
import importlib
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import pandas as pd
import pytest

import hierfl
from hierfl import Schema
from hierfl.cli.officer_page import entries
from hierfl.core.trees import tree_map
from hierfl.formulas.columns import Column
from hierfl.formulas.questions import Question
from hierfl.formulas.signatures import ADDITIONS
from hierfl.models.families.names import FAMILIES
from hierfl.nodes import Station
from hierfl.nodes.approval import approve, write_preview
from hierfl.nodes.client_rows import check_brought
from hierfl.nodes.envelope import read_answer, read_request, write_answer, write_request
from hierfl.nodes.log import FAILS
from hierfl.nodes.messages import NodeFailed, Refused, from_bytes, to_bytes
from hierfl.nodes.policy import Forbidden, Policy, policy_at
from tests.nodes.transports import RAN, TEXT, Evil, formula, frames
from tests.nodes.ways import Organizations, algorithm

pytestmark = [
    pytest.mark.usefixtures("without_copies"),
    pytest.mark.filterwarnings("ignore:the rounds ended"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vantage6
]
FOLDER = Path(__file__).parents[2] / "examples" / "vantage6_formula"
STORE: dict[str, Any] = json.loads((FOLDER / "algorithm_store.json").read_text())
HOW = {"formula": TEXT, "clients": "hospital", "family": "bernoulli"}
LISTED = f"{TEXT}; family = bernoulli; priors = age"


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """A collaboration of the four hospitals, whose nodes keep their folders in tmp_path."""
    mock = pytest.importorskip("vantage6.algorithm.tools.mock_client")
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("TEMPORARY_FOLDER", str(tmp_path))
    monkeypatch.setenv("HIERFL_FORMULAS", LISTED)

    def made(parts: dict[str, pd.DataFrame] | None = None) -> Any:
        named = (parts or frames()).items()
        rows = [[{"database": part.assign(hospital=name)}] for name, part in named]
        return mock.MockAlgorithmClient(datasets=rows, module="hierfl_formula")

    return made


def run(client: Any, **kwargs: Any) -> dict[str, Any]:
    task = client.task.create(
        input_={"method": "central", "kwargs": {**HOW, **kwargs}}, organizations=[0]
    )
    (found,) = client.wait_for_results(task_id=task["id"])
    return found


def test_a_formula_is_fitted_as_here(network: Any, tmp_path: Path) -> None:
    found = run(network(), draws=200)
    here = hierfl.fit(formula(), frames())
    assert found["chosen"].startswith("two_stage") and found["clients"] == sorted(frames())
    assert len(found["rounds"]) == len(here.history)
    draws: Any = here.posterior(draws=200)["posterior"]
    means = {line["parameter"]: line["mean"] for line in found["summary"]}
    for name in [name for name in draws.data_vars if draws[name].ndim == 2]:
        assert means[name] == pytest.approx(float(draws[name].mean()), abs=1e-9), name
    for k in range(4):
        left = [one["what"] for one in entries(tmp_path / f"organization-{k}")]
        assert left.count("update") == len(found["rounds"]) and "introduction" in left


def test_rows_without_the_column_are_named_as_in_vantage6(network: Any) -> None:
    client = network()
    for tables in client.datasets_per_org.values():
        del tables[0]["hospital"]
    assert run(client, rounds=1)["clients"] == [f"mock-{k}" for k in range(4)]


def test_the_environment_of_a_node_is_its_policy(
    network: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIERFL_MIN_ROWS", "150")
    monkeypatch.setenv("HIERFL_METHODS", "two_stage, fedsvi")
    with pytest.warns(UserWarning, match="asks for 150 rows or more"):
        found = run(network(), rounds=1)
    assert found["clients"] == sorted(n for n, part in frames().items() if len(part) >= 150)
    said = (tmp_path / "organization-0" / "environment.toml").read_text()
    assert said == f'formulas = ["{LISTED}"]\nmethods = ["two_stage", "fedsvi"]\nmin_rows = 150\n'
    line = next(one for one in entries(tmp_path / "organization-0") if one["what"] == "update")
    assert line["policy"] == {
        "methods": ["fedsvi", "two_stage"],
        "min_rows": 150,
        "formulas": [LISTED],
    }
    assert line["by"] == "vantage6 collaboration 1"


def test_priors_are_a_few_distributions_with_numbers(network: Any) -> None:
    found = run(network(), rounds=1, priors={"age": ["Normal", 0, 0.001]})
    mean = next(line["mean"] for line in found["summary"] if line["parameter"] == "age")
    assert abs(mean) < 0.01
    for wrong in (["os.system", 0], ["Normal", "__import__('os')"], ["MaskedDistribution", 1]):
        with pytest.raises(ValueError, match="write one of Normal"):
            run(network(), priors={"age": wrong})


@pytest.mark.parametrize(
    "text",
    [
        "y ~ __import__('os').system('true') + (1 | hospital)",
        "y ~ eval(age) + (1 | hospital)",
        "y ~ np.load(age) + (1 | hospital)",
        "y ~ {open('/etc/passwd')} + (1 | hospital)",
        "y ~ `age'); raise SystemExit(1) #` + (1 | hospital)",
    ],
)
def test_no_code_of_a_formula_is_run(text: str, network: Any) -> None:
    with pytest.raises((ValueError, KeyError, hierfl.nodes.TooFewNodes)):
        run(network(), formula=text)


@pytest.mark.parametrize("wrong", ["NaN", "another client"])
def test_wrong_answers_are_refused(
    wrong: str, network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over other transports: one organization lies in its rounds, here of a Gaussian summary."""
    asked = Station.answer

    def lie(content: bytes) -> bytes:
        found = from_bytes(content, most=1 << 20)
        if wrong == "another client":
            return to_bytes(found.tree, {**found.about, "client": "cleveland"})
        nan = tree_map(lambda v: v * float("nan") if v.is_floating_point() else v, found.tree)
        return to_bytes(nan, found.about)

    def lied(self: Station, request: bytes, *, by: Any = None) -> bytes:
        answer = asked(self, request, by=by)
        if self.folder.name == "organization-3" and read_request(request)[0] == "round":
            return write_answer(request, lie(read_answer(request, answer)))
        return answer

    monkeypatch.setattr(Station, "answer", lied)
    found = run(network(), rounds=1)
    (left_out,) = found["left_out"]
    why = {"NaN": "is not finite", "another client": "client cleveland"}[wrong]
    assert left_out["client"] == "va" and why in left_out["reason"]


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The algorithm's module, whose node keeps its folder in tmp_path."""
    monkeypatch.setenv("TEMPORARY_FOLDER", str(tmp_path))
    with algorithm() as module:
        yield module


def partial(functions: Any, **kwargs: Any) -> Any:
    """Call `partial` as a task of organization 1 does."""
    frame = frames()["va"].assign(hospital="va")
    given = {**HOW, "priors": None, "missing": "refuse", **kwargs}
    client = Organizations(functions, 1)
    return functions.partial(mock_client=client, mock_data=[frame], **given)


@pytest.mark.parametrize(
    "request_",
    [
        "",
        "!",
        "\u00e9",
        "AAA",
        base64.b64encode(pickle.dumps(Evil())).decode(),
        7,
        True,
        None,
        [],
        {"a": 1},
        "A" * 4096,
    ],
)
def test_a_node_refuses_requests_of_other_types(
    request_: Any, functions: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(functions, "LONGEST", 2048)
    found = base64.b64decode(partial(functions, request=request_))
    line = json.loads(found.partition(b"\n")[0])
    assert line["wrong"] and line["bytes"] == 0 and not RAN.exists()
    (logged,) = entries(tmp_path / "organization-1")
    assert logged["what"] == "refusal" and logged["by"] == "vantage6 collaboration 1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"formula": 7},
        {"formula": [7]},
        {"clients": None},
        {"clients": {"a": 1}},
        {"family": 3},
        {"family": "__import__"},
        {"priors": "age"},
        {"priors": {"age": 3}},
        {"priors": {"age": []}},
        {"priors": {"age": ["Normal", "0", 1]}},
        {"priors": {"age": ["Normal", True, 1]}},
        {"missing": "never"},
        {"more": 1},
    ],
)
def test_arguments_of_other_types_end_a_task_before_a_row_is_read(
    wrong: dict[str, Any], functions: Any, tmp_path: Path
) -> None:
    """vantage6 then says that it failed; its message, which the server gets, names no value of a row."""
    sent = {"request": base64.b64encode(write_request("introduce", b"")).decode(), **wrong}
    with pytest.raises((TypeError, ValueError, KeyError, AttributeError)) as error:
        partial(functions, **sent)
    ages = {str(age) for age in frames()["va"]["age"]}
    assert not ages & set(str(error.value).replace(",", " ").split())
    assert not entries(tmp_path / "organization-1")


ONE_PATIENT = "y ~ scale(thalach * exp(0 - abs(age - 77) * 50)) + (1 | hospital)"


def test_a_formula_of_a_task_waits_for_its_owner(
    functions: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent = base64.b64encode(write_request("schema", Question("rows").json().encode())).decode()

    def said(formula: str, **how: str) -> str:
        found = base64.b64decode(partial(functions, formula=formula, request=sent, **how))
        return str(json.loads(found.partition(b"\n")[0])["wrong"] or "")

    folder = tmp_path / "organization-1"
    assert "waits for the approval" in said(TEXT)
    approve(folder, next((folder / "previews").glob("*.txt")).stem)
    assert not said(TEXT) and "waits for the approval" in said(ONE_PATIENT)
    monkeypatch.setenv("HIERFL_COLUMNS", "age, thalach, y, hospital")
    for text in (
        "y ~ scale(age) + s(thalach) + (1 | hospital)",
        "y ~ age:thalach + (1 | hospital)",
    ):
        assert not said(text)
    others = ["y ~ log(age) + (1 | hospital)", "y ~ I(age * thalach)", "y ~ sex", ONE_PATIENT]
    bounds = ["y ~ bs(age, df=5, upper_bound=77)", "y ~ gp(age, c=1.77)"]
    for text in [*others, *bounds, "y ~ offset(age - 77)", "y ~ C(age) + (1 | sex)"]:
        assert "waits for the approval" in said(text), text
    assert "waits for the approval" in said("y | trunc(ub=77) ~ age", family="gaussian")
    monkeypatch.setenv("HIERFL_TRANSFORMS", "log, scale")
    assert not said("y ~ scale(log(age)) + (1 | hospital)")
    assert "waits for the approval" in said("y ~ log(age - 76) + (1 | hospital)")


COLUMNS = pd.DataFrame(columns=["h", "secret", "x", "y", "z"])


def test_what_an_owner_approves_has_no_line_that_the_request_forges(tmp_path: Path) -> None:
    """Nor what moves a terminal's cursor, nor two requests whose texts look the same."""
    line = "\x1b[2J\u202e\nPriors of hierfl\nIt reads the columns x, y."
    asked: list[tuple[str, dict[str, Any]]] = [
        ("y ~ x + (1 | h)", {"clients": f"h{line}"}),
        (f"y ~ x + `z{line}` + (1 | h)", {}),
        ("y ~ x + (1 | h)", {"priors": {f"b{line}": "normal(0, 1)"}}),
        ("y ~ x + `a\nb` + (1 | h)", {}),
        ("y ~ x + `a\\nb` + (1 | h)", {}),
    ]
    for text, how in asked:
        with pytest.raises(Forbidden, match="waits for the approval"):
            check_brought(hierfl.formula(text, **{"clients": "h", **how}), tmp_path, None, COLUMNS)
    texts = [path.read_text() for path in (tmp_path / "previews").glob("*.txt")]
    assert len(texts) == len(asked)
    for text in texts:
        first = [of.partition(" ")[0] for of in text.splitlines()]
        assert first == ["A", "y", "Likelihood", "Priors", "It", ""]
        assert text.replace("\n", "").isprintable()
    write_preview(tmp_path, "run", line)  # of a run, whose settings come from a server
    assert "\x1b" not in (tmp_path / "previews" / "run.txt").read_text()


@pytest.mark.parametrize("key", ["columns", "formulas"])
def test_a_misspelled_column_of_a_policy_stops_the_node(key: str, tmp_path: Path) -> None:
    """Its owner reads which; the server learns no column, whatever formula it brings."""
    listed = 'formulas = ["y ~ x"]\n' if key == "formulas" else ""
    (tmp_path / "policy.toml").write_text(f'{listed}columns = ["y", "secrte"]\n')
    for text in ("y ~ x", "y ~ secrte", "y ~ secret"):
        for rows in (COLUMNS, {"north": COLUMNS}):
            with pytest.raises(NodeFailed) as refusal:
                check_brought(hierfl.formula(text, clients="h"), tmp_path, None, rows)
            assert str(refusal.value) == FAILS and "secret" not in FAILS
    last = json.loads((tmp_path / "refused.jsonl").read_text().splitlines()[-1])
    assert "the policy lists the column 'secrte': did you mean 'secret'?" in last["detail"]


def test_a_policy_that_lists_no_function_allows_none(tmp_path: Path) -> None:
    asked, policy = hierfl.formula("y ~ scale(x)", clients="h"), tmp_path / "policy.toml"
    policy.write_text('columns = ["y", "x", "h"]\n')
    check_brought(asked, tmp_path, None, COLUMNS)
    policy.write_text('columns = ["y", "x", "h"]\ntransforms = []\n')
    with pytest.raises(Forbidden, match="waits for the approval"):
        check_brought(asked, tmp_path, None, COLUMNS)


# addition to a response -> how it reads a column, and a family that has it
READS = {
    "trials": ("y | trials(secret) ~ x", "binomial"),
    "weights": ("y | weights(secret) ~ x", "gaussian"),
    "cens": ("y | cens(secret) ~ x", "weibull"),
    "event": ("y | event(secret) ~ x", "weibull"),
    "upper": ("y | cens(x, secret) ~ z", "weibull"),
    "entry": ("y | entry(secret) ~ x", "weibull"),
}


@pytest.mark.parametrize("addition", sorted({*ADDITIONS, "upper"} - {"trunc"}))  # which reads none
def test_no_addition_reads_a_column_that_the_policy_does_not_list(
    addition: str, tmp_path: Path
) -> None:
    text, family = READS[addition]
    asked = hierfl.formula(text, family, clients="h")
    assert asked.declared.parts.additions[addition] == "secret"
    for listed in (["h", "x", "y", "z"], ["h", "secret", "x", "y", "z"]):
        (tmp_path / "policy.toml").write_text(f"columns = {json.dumps(listed)}\n")
        waits = pytest.raises(Forbidden, match="waits for the approval")
        with nullcontext() if "secret" in listed else waits:
            check_brought(asked, tmp_path, None, COLUMNS)
    assert "secret" in next((tmp_path / "previews").glob("*.txt")).read_text()


def test_the_column_of_clients_is_read_too(tmp_path: Path) -> None:
    """Its value is the client's name: of rows that all have one diagnosis that diagnosis."""
    (tmp_path / "policy.toml").write_text('columns = ["x", "y"]\n')
    rows = pd.DataFrame({"x": [1.0, 2.0], "y": [0.0, 1.0], "diagnosis": ["rare", "rare"]})
    for text in ("y ~ x", "y ~ x + (1 | diagnosis)"):
        asked = hierfl.formula(text, clients="diagnosis")
        with pytest.raises(Forbidden, match="waits for the approval"):
            check_brought(asked, tmp_path, None, rows)
        check_brought(asked, tmp_path, None, {"north": rows.drop(columns="diagnosis")})


def test_a_formula_that_nobody_reads_takes_no_space(tmp_path: Path) -> None:
    """Each task brings another one, of the task's own size, and its owner would have them all on disk."""
    long = hierfl.formula(f"y ~ `{'a' * 10**6}` + (1 | h)", clients="h")
    with pytest.raises(Forbidden, match="more than 262,144 characters"):
        check_brought(long, tmp_path, None, {})
    assert not [*(tmp_path / "previews").glob("*")]


def test_a_listed_formula_is_the_one_that_reads_the_same(tmp_path: Path) -> None:
    """Blanks may differ, but not those of a column's name."""
    listed = "y ~ `a b` + x + (1 | h)"
    (tmp_path / "policy.toml").write_text(f'formulas = ["{listed}", "no formula ~"]')
    for text in (listed, "y~`a b`+x+(1|h)"):
        check_brought(hierfl.formula(text, clients="h"), tmp_path, None, {})
    for text in ("y ~ `ab` + x + (1 | h)", "y ~ `a  b` + x + (1 | h)", f"{listed}; sigma ~ x"):
        with pytest.raises(Forbidden, match="waits for the approval"):
            check_brought(hierfl.formula(text, clients="h"), tmp_path, None, {})


WHOLE: dict[str, Any] = {"family": "bernoulli", "clients": "h", "missing": "drop"}
OTHERS: dict[str, dict[str, Any]] = {
    "a family": {"family": "poisson"},
    "a link": {"family": hierfl.models.families.bernoulli("probit")},
    "rows that lack a value": {"missing": "refuse"},
    "clients": {"clients": "x"},
    "a prior": {"priors": {"sd": "exponential(1)"}},
    "a schema": {"schema": Schema("h", 2, 1, {of: Column("number") for of in ("y", "x")})},
    "a matrix": {"data2": {"W": pd.DataFrame([[1.0]], ["a"], ["a"])}},
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_listed_formula_is_listed_with_all_that_a_request_brings(
    what: str, tmp_path: Path
) -> None:
    """Whoever lists zeros and ones of complete rows has not listed counts, nor each row without a value."""
    line = "y ~ x + (1 | h); family = bernoulli; missing = drop; priors = b, Intercept"
    policy, own = tmp_path / "policy.toml", {**WHOLE, "priors": {"b": "normal(0, 1)"}}
    policy.write_text(f'formulas = ["{line}"]\n')
    check_brought(hierfl.formula("y~x+(1|h)", **own), tmp_path, None, {})
    changed = hierfl.formula("y ~ x + (1 | h)", **{**WHOLE, **OTHERS[what]})
    with pytest.raises(Forbidden, match="waits for the approval"):
        check_brought(changed, tmp_path, None, {})
    policy.write_text('columns = ["x", "y", "h"]\n')  # with any family and priors
    is_more = what in ("a schema", "a matrix")
    with pytest.raises(Forbidden, match="waits for") if is_more else nullcontext():
        check_brought(changed, tmp_path, None, COLUMNS)


def test_a_task_can_call_two_functions(functions: Any) -> None:
    """vantage6 calls what a task names of the package, and sends back what that returns."""
    package = importlib.import_module("hierfl_formula")
    assert {name for name, one in vars(package).items() if name[0] != "_" and callable(one)} == {
        "central",
        "partial",
    }


def test_what_a_container_prints_names_no_value(
    functions: Any,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A node sends the server what is printed."""

    def warns(self: Station, request: bytes, *, by: Any = None) -> bytes:
        warnings.warn("row 4711", stacklevel=1)
        return b""

    monkeypatch.setattr(Station, "answer", warns)
    assert partial(functions, request="") == ""
    assert not [one for one in recwarn if "4711" in str(one.message)]
    printed = capfd.readouterr()
    assert "0 bytes leave this node" in printed.out + printed.err


def test_an_organization_that_never_answers_keeps_nobody_waiting(functions: Any) -> None:
    """Nor does one that no task can be made for."""
    over = Event()

    class Slow(Organizations):
        def create(self, **sent: Any) -> Any:
            (number,) = sent["organizations"]
            return {"msg": "it has no key"} if number == 0 else {"id": number}

        def wait_for_results(self, task_id: int, interval: float) -> list[str]:
            if task_id == 1:
                over.wait()
            return ["aGllcmZs"]

    asked = {**HOW, "priors": None, "missing": "refuse"}
    contents = dict.fromkeys(["0", "1", "2"], b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "SOON", 0.2)
        reached = functions._nodes(Slow(functions), range(3), asked, 1, 0.2)
        answers = {of.client: of.reason for of in reached.send("introduce", contents)}
    over.set()
    assert answers["0"] == "no task can be made for it (KeyError)"
    assert answers["1"] == "its task 1 gave no answer within 0.2 s"
    assert "it is not" in answers["2"]


def test_the_store_describes_what_there_is() -> None:
    """Without vantage6: the functions and their arguments are those of the code."""
    source = (FOLDER / "hierfl_formula" / "algorithm.py").read_text()
    central, partial = STORE["functions"]
    for function in (central, partial):
        head = source.partition(f"def {function['name']}(")[2].partition(") ->")[0]
        for argument in function["arguments"]:
            assert f"    {argument['name']}: " in head
    family = next(one for one in central["arguments"] if one["name"] == "family")
    assert family["allowed_values"] == sorted(FAMILIES)
    assert "PKG_NAME=hierfl_formula" in (FOLDER / "Dockerfile").read_text()


def test_a_misspelled_variable_of_a_node_stops_it(
    functions: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIERFL_FORMULAS", LISTED)
    request = write_request("schema", Question("rows").json().encode())
    for variable, value, why in (
        ("HIERFL_MIN_ROW", "150", "no key 'min_row': did you mean 'min_rows'"),
        ("HIERFL_", "150", "cannot be read"),
        ("HEIRFL_MIN_ROWS", "150", "no key 'heirfl_min_rows': did you mean 'min_rows'"),
        ("HEIRFL_MINROWS", "150", "no key 'heirfl_minrows': did you mean 'min_rows'"),
        ("HI_RFL_MIN_ROWS", "150", "no key 'hi_rfl_min_rows': did you mean 'min_rows'"),
        ("HIREFL_DATABASE_URI", "/mnt", "no key 'hirefl_database_uri'"),
        ("hierfl_min_rows", "150", "no key 'hierfl_min_rows': did you mean 'min_rows'"),
        ("HIERFL_MIN_ROWS", "many", "min_rows is 'many': Expected `int`"),
        ("HIERFL_APPROVE", '"', "approve is '\"': Invalid enum"),
        ("HIERFL_METHODS", "fedsvy", "did you mean 'fedsvi'"),
        ("HIERFL_formulas", "y ~ x", "Cannot overwrite a value"),
    ):
        with monkeypatch.context() as here:
            here.setenv(variable, value)
            sent = base64.b64encode(request).decode()
            found = base64.b64decode(partial(functions, request=sent))
        with pytest.raises(Refused, match="the node cannot answer"):
            read_answer(request, found)
        line = entries(tmp_path / "organization-1")[-1]
        assert line["what"] == "refusal" and why in line["detail"]


def test_every_key_of_a_policy_has_a_variable(
    functions: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = Policy(
        methods=frozenset(["fedsvi", "two_stage"]),
        formulas=frozenset(["y ~ x, z"]),
        epsilon=2.0,
        delta=1e-6,
        min_rows=20,
        seconds_a_request=9,
        approve="ask",
    )
    for key, value in own.said().items():
        sign = "\n" if key == "formulas" else ", "
        text = sign.join(value) if isinstance(value, list) else str(value)
        monkeypatch.setenv(f"HIERFL_{key.upper()}", text)
    assert policy_at(functions._policy(tmp_path), tmp_path) == own
