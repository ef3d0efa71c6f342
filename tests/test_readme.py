"""README, CONTRIBUTING and docs/: their code runs, commands parse, links resolve and tables are complete."""

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from torch import nn
from typer.core import TyperGroup
from typer.main import get_command

import hierfl
from hierfl import cli
from hierfl.comparisons import read_study
from hierfl.core.trees import tree_leaves
from hierfl.methods.about import About, Wrapper, described
from hierfl.program import public_names
from hierfl.runs import choice
from hierfl.runs import fit as chosen

ROOT = Path(__file__).parent.parent
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", *DOCS]
RESULTS = [f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.md")]
TEXT = {page: (ROOT / page).read_text() for page in PAGES}
BLOCKS = {page: re.findall(r"```python\n(.*?)```", TEXT[page], re.DOTALL) for page in PAGES}
MOST = {  # of these arguments, so that a page takes seconds
    "draws": 50,
    "checkpoint_every": 2,
    "replications": 10,
    "rounds": 4,
    "eval_every": 2,
    "steps": 20,
    "warmup": 20,
}
LONGER = {"docs/diagnostics.md": {"rounds": 10}}  # a trend is estimated from these
FEWER_PATIENTS = ["docs/diagnostics.md", "docs/runs.md", "docs/cheatsheet.md"]
FEWER_PATIENTS += [
    "docs/differential_privacy.md",
    "docs/from_bambi.md",
    "docs/from_datashield.md",
    "docs/from_lme4.md",
]


def run(page: str, first: int = 0, last: int | None = None, **names: Any) -> dict[str, Any]:
    """Run the Python blocks of a page one after another, in one namespace, with small numbers."""
    most = {**MOST, **LONGER.get(page, {})}

    def smaller(found: re.Match[str]) -> str:
        name, number = found[1], int(found[2])
        return f"{name}={min(number, most.get(name, number))}"

    torch.set_default_dtype(torch.float32)  # as users have it
    names["__name__"] = "page"
    for code in BLOCKS[page][first:last]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            exec(compile(re.sub(r"\b(\w+)=(\d+)\b", smaller, code), page, "exec"), names)
        assert text.getvalue().strip() or "\nprint(" not in f"\n{code}", code
    return names


def fewer_patients(
    missing: Any = "indicator", whole: Any = hierfl.datasets.heart_disease
) -> hierfl.ClientData:
    """Return a quarter of the patients of heart disease, with three features."""
    data = whole(missing).split(0.25, seed=0)[0]
    return replace(
        data.with_fields(x=data.fields["x"][:, :3]), features={"x": data.features["x"][:3]}
    )


def with_little_work(patch: pytest.MonkeyPatch) -> None:
    """Weight few draws, once, and take short trajectories: no number of a page is looked at."""
    judged = importlib.import_module("hierfl.diagnostics.convergence")
    groups = importlib.import_module("hierfl.posterior.arviz_groups")
    nuts = importlib.import_module("hierfl.diagnostics.nuts")
    moments = judged.moments_of
    patch.setattr(judged, "moments_of", lambda fit, count, **how: moments(fit, 100, **how))
    patch.setattr(groups, "corrected", partial(groups.corrected, proposals=100, rounds=1))
    patch.setattr(nuts, "NUTS", partial(nuts.NUTS, max_tree_depth=4))
    left_out = importlib.import_module("hierfl.diagnostics.loo")
    for name, before in (("scored_rows", 2), ("scored_clients", 1)):  # arguments before `draws`
        whole = getattr(left_out, name)
        patch.setattr(
            left_out,
            name,
            lambda *of, whole=whole, at=before: whole(*of[:at], 100, *of[at + 1 :]),
        )
    precision, small = hierfl.precision, {"clients": (4,), "rows": (50,)}
    patch.setattr(hierfl, "precision", lambda *of, **how: precision(*of, **{**how, **small}))


# ------------------------------------------------------------------ code
@pytest.mark.slow(
    "docs/cheatsheet.md",
    "docs/describe.md",
    "docs/diagnostics.md",
    "docs/differential_privacy.md",
    "docs/effects.md",
    "docs/formula_terms.md",
    "docs/from_bambi.md",
    "docs/from_datashield.md",
    "docs/from_pyro.md",
    "docs/living.md",
    "docs/methods.md",
    "docs/nodes.md",
    "docs/runs.md",
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # fits of few rounds are warned of, rightly
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if "tutorial" in page else [])
        for page in PAGES
        if BLOCKS[page]
    ],
)
def test_the_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # a busy machine makes compile="auto" compile even these
    monkeypatch.setattr(hierfl, "fit", partial(hierfl.fit, settings=hierfl.Settings(compile=False)))
    # a model is given to the fastest method that it can be given to, for a few rounds
    # on nodes the chosen one is faster, and what follows needs what it keeps
    if page not in ("docs/from_datashield.md", "docs/living.md", "docs/tutorial.md"):
        monkeypatch.setattr(choice, "MOST_SHARED", 0)
    monkeypatch.setattr(chosen, "ATTEMPTS", (4,))
    monkeypatch.setattr(public_names, "_MARKED", {})  # other tests mark models of the same names
    monkeypatch.setattr("hierfl.diagnostics.trend.LEAST_ROUNDS", 10)
    with_little_work(monkeypatch)
    if page in FEWER_PATIENTS:
        monkeypatch.setattr(hierfl.datasets, "heart_disease", fewer_patients)
    names = run(page)
    if page == "README.md":
        posterior = names["posterior"].posterior
        assert posterior["hospital"].dims == ("chain", "draw", "client")
        assert set(posterior.client.values) == set(names["patients"]["hospital"])
    if page == "docs/runs.md":
        assert {"elbo", "bytes_up", "seconds", "validation_log_score"} <= set(names["fit"].history)
        again, fit, test = names["again"], names["fit"], names["test"]
        assert torch.equal(again.predict(test).mean, fit.predict(test).mean)
    if page == "docs/diagnostics.md":
        assert (tmp_path / "report.html").stat().st_size > 10_000
        assert (tmp_path / "diagnostics.png").is_file()
    if page == "docs/disclosure.md":
        torch.testing.assert_close(names["recovered"], names["secret"][0], rtol=1e-3, atol=1e-4)


def test_pages_with_code_have_some() -> None:
    words = (
        "choosing_methods comparisons crossing faq gallery/index glossary operators privacy results"
    )
    words += " engines verdict methods_compared node_faults node_policy nodes_files nodes_vantage6"
    words += " scale studies threat_model"
    bare = {f"docs/{word}.md" for word in words.split()}
    assert {page for page in PAGES if BLOCKS[page]} == {"README.md", *DOCS} - bare


def test_the_method_written_there_is_fedavg() -> None:
    data = hierfl.ClientData.from_arrays(
        [0] * 9 + [1] * 30, x=torch.randn(39, 4), y=torch.arange(39) % 3
    )
    model = hierfl.models.network(nn.Linear(4, 3))
    code = BLOCKS["docs/write_a_method.md"][0].split("\n\n\ntrain, test =")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/write_a_method.md", "exec"), names)
    mine = hierfl.fit(names["fedavg"](model), data, rounds=3)
    theirs = hierfl.methods.fedavg(model, optimizer=hierfl.optimizers.SGD(0.1), steps=5)
    for a, b in zip(
        tree_leaves(mine.message),
        tree_leaves(hierfl.fit(theirs, data, rounds=3).message),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


# ------------------------------------------------------------------ commands
def commands() -> list[str]:
    """Every command on a page, in a shell block or between backticks; hierfl's own without `--quick`."""
    found = set()
    for text in TEXT.values():
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            found |= set(block.splitlines())
        found |= set(re.findall(r"`((?:hierfl|make|pip|python|HIERFL_\w+=\S+) [^`]+)`", text))
    bare = {re.sub("^(hierfl .*) --quick", r"\1", command) for command in found}
    return sorted(bare - {"hierfl demo"})


@pytest.mark.parametrize("command", commands())
def test_the_commands_are_taken(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command of the pages is one that its program takes; other tests run them.

    hierfl's own and the benchmarks' arguments parse, make has the targets, and named files, studies
    and methods exist.
    """
    program, *words = shlex.split(re.sub(r"^HIERFL_\w+=\S+ ", "", command))
    if program == "hierfl":
        monkeypatch.chdir(tmp_path)
        for word in words if words[0] == "node" else ():
            (tmp_path / word).mkdir(exist_ok=True)  # folders of nodes, which must be there
            (tmp_path / word / "policy.toml").touch()
        check_arguments(words)
    elif program == "make":
        done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    elif words[0] == "-m" and words[1].startswith("benchmarks."):
        with pytest.raises(SystemExit) as end:
            module = importlib.import_module(words[1])
            if hasattr(module, "__path__"):
                module = importlib.import_module(f"{words[1]}.__main__")
            module.main([*words[2:], "--help"])
        assert end.value.code == 0
    else:
        files = [word for word in words if "/" in word or word.endswith(".txt")]
        assert all((ROOT / file).exists() for file in files)
        assert program in ("pip", "python")


def check_arguments(words: list[str]) -> None:
    """Check that hierfl has this command and that it takes these arguments, without running it."""
    command, context = get_command(cli.app), None
    while isinstance(command, TyperGroup):
        name, *words = words
        context = command.make_context("hierfl", [name], parent=context)
        found = command.get_command(context, name)
        assert found is not None, name
        command = found
    if not words and command.name not in ("methods", "compare"):
        return  # the page names the command alone
    with command.make_context(command.name, list(words), parent=context) as made:
        given = made.params
    assert all((ROOT / word).exists() for word in words if "/" in word)
    if command.name == "compare" and (given["study"] or "X").islower():
        variants = read_study.read(read_study.find(given["study"]), quick=True)
        read_study.chosen(variants, given["variant"])
    if command.name == "audit" and given["method"].islower():
        assert given["method"] in described(About)


# ------------------------------------------------------------------ form
def test_readme_is_short() -> None:
    assert len(TEXT["README.md"].splitlines()) <= 115


@pytest.mark.parametrize("page", sorted({"README.md", *DOCS}))
def test_a_page_is_read_in_one_sitting_and_nothing_of_it_is_cut(page: str) -> None:
    assert len(TEXT[page].split()) <= 2000
    assert all(len(line) <= 78 for code in BLOCKS[page] for line in code.splitlines())


@pytest.mark.parametrize("page", sorted([*PAGES, *RESULTS]))
def test_lines_of_pages_are_short(page: str) -> None:
    lines = (ROOT / page).read_text().splitlines()
    assert all(len(line) <= 150 or line.startswith(("|", "![")) for line in lines)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_one_title_and_links_that_lead_somewhere(page: str) -> None:
    prose = re.sub(r"```.*?```", "", TEXT[page], flags=re.DOTALL)
    assert len(re.findall(r"^# ", prose, re.MULTILINE)) == 1
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        if not link.startswith("https://"):
            assert (ROOT / page).parent.joinpath(link).exists(), link
    for file in re.findall(r"`((?:tests|benchmarks|examples|hierfl|docs)/[\w/]+\.\w+)`", prose):
        if "NAME" not in file:
            assert (ROOT / file).exists(), file


def test_ten_lines_are_ten() -> None:
    assert len([line for line in BLOCKS["README.md"][0].splitlines() if line]) == 10


@pytest.mark.parametrize("name", ["demo_coefficients", "effects"])
def test_a_picture_is_small_and_not_blank(name: str) -> None:
    picture = ROOT / "docs" / "images" / f"{name}.png"
    assert picture.stat().st_size < 150_000
    assert imread(picture).std() > 0.05


# ------------------------------------------------------------------ tables
def rows_of(page: str) -> dict[str, list[str]]:
    """The rows of a page's tables by their first name in backticks."""
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in TEXT[page].splitlines()
        if line.startswith("| `")
    ]
    return {re.split(r"[(`.]", cells[0][1:])[0]: cells for cells in reversed(rows)}


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("docs/guides.md", set(hierfl.guides.__all__)),
        ("docs/methods.md", set(described(About))),
        ("docs/wrappers.md", set(described(Wrapper))),
        (
            "docs/crossing.md",
            set(described(About)),
        ),
        ("docs/comparisons.md", set(read_study.names())),
        ("docs/data.md", set(hierfl.datasets.__all__) - {"Labeled", "ReferenceSummary"}),
        ("docs/diagnostics.md", set(hierfl.plots.__all__) - {"COLORS", "MARKERS"}),
    ],
)
def test_nothing_is_missing(page: str, names: set[str]) -> None:
    missing = {name for name in names if not re.search(rf"[`.]{name}\b", TEXT[page])}
    assert not missing


def test_the_rooms_are_those_of_the_linter() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [set(layer.split(" | ")) for layer in lint["contracts"][0]["layers"]]
    table = TEXT["CONTRIBUTING.md"].split("## Where things are")[1].split("\n## ")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert [set(re.findall(r"`(\w+)`", cell)) for cell in first] == layers
