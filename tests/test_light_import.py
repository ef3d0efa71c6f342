"""`import hierfl` loads few modules, every public name resolves, and ArviZ's announcement is not
shown.
"""

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import hierfl

ROOT = Path(__file__).parent.parent
HEAVY = ("arviz", "matplotlib", "pandas", "scipy.stats", "seaborn", "xarray", "torch._inductor")
ANNOUNCED = "ArviZ is undergoing a major refactor"


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that imports this checkout."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**found, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


# ------------------------------------------------------------ modules loaded
STAGES = """
import json, os, sys
for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
    os.environ.pop(name, None)
environment, before = dict(os.environ), set(sys.modules)
import hierfl
imported = sorted(set(sys.modules) - before)
import hierfl.flower
hierfl.flower.apps, hierfl.methods.two_stage, hierfl.models.regression
of_app = sorted(sys.modules)
hierfl.fit, hierfl.load, hierfl.methods, hierfl.models, hierfl.guides, hierfl.ClientData
changed = [name for name, value in os.environ.items() if environment.get(name) != value]
used = sorted(sys.modules)
from hierfl import *
missing = [name for name in hierfl.__all__ if globals()[name] is not getattr(hierfl, name)]
print(json.dumps([imported, changed, of_app, used, missing]))

from benchmarks.zoo.reading import data_of, program_of
import torch
from hierfl.laplace.trials import jacobian_of
program = program_of("disasters")
fit = hierfl.fit(program.model, data_of(program), seed=0, progress=False, time_limit=1e-3)
jacobian_of(lambda x: x.repeat(2), torch.ones(2))  # of rows that are many
assert "chains on all clients' rows" in fit.summary().verdict, fit.summary().verdict
print(json.dumps(sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules))))

from hierfl.posterior import arviz_io
arviz_io.arviz()
assert "arviz" in sys.modules
"""


class Fresh(NamedTuple):
    """What a fresh interpreter printed, and its home."""

    done: subprocess.CompletedProcess[str]
    home: Path

    def printed(self, line: int) -> Any:
        return json.loads(self.done.stdout.splitlines()[line])


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """A fresh interpreter in which hierfl is imported, names are used, a program is fitted and ArviZ imported."""
    home = tmp_path_factory.mktemp("home")
    done = python(STAGES, HOME=str(home), XDG_CACHE_HOME=str(home))
    assert done.returncode == 0, done.stderr[-2000:]
    return Fresh(done, home)


@pytest.fixture
def stages(fresh: Fresh) -> list[list[str]]:
    """Modules that `import hierfl` loads; environment variables changed; modules loaded by an app
    of a node, and once names are used; names that a star import lacks.
    """
    return [list(found) for found in fresh.printed(0)]


def test_import_hierfl_loads_few_modules(stages: list[list[str]]) -> None:
    imported = stages[0]
    assert not {"torch", "pyro", *HEAVY} & set(imported)
    assert [name for name in imported if name.split(".")[0] == "hierfl"] == ["hierfl"]
    assert len(imported) < 20, imported


def test_import_hierfl_changes_no_environment(stages: list[list[str]]) -> None:
    """Flower sets GRPC_VERBOSITY; tests/core/test_allocator.py covers malloc."""
    assert not [name for name in stages[1] if not name.startswith(("TORCH", "KMP", "GRPC"))]


def test_fitting_loads_neither_arviz_nor_plots(stages: list[list[str]]) -> None:
    used = set(stages[3])
    assert {"torch", "pyro", "hierfl.runs"} <= used
    assert not used & {"arviz", "matplotlib", "seaborn", "xarray", "torch._inductor"}


def test_chains_load_no_compiler(fresh: Fresh) -> None:
    """It takes seconds: torch's modes, optimizers and `grad_outputs` load it."""
    assert fresh.printed(1) == []


def test_an_app_of_a_node_loads_nothing_of_fits_and_servers(stages: list[list[str]]) -> None:
    """On Flower each message starts a process, which imports all of it again."""
    loaded = set(stages[2])
    assert "hierfl.nodes.node" in loaded
    assert not loaded & {*HEAVY, "sympy", "sqlalchemy", "hierfl.runs.result", "hierfl.nodes.run"}


# ------------------------------------------------------------ public names
LAZY = (  # packages with an __init__.pyi
    "hierfl",
    *(f"hierfl.{room}" for room in ("data", "nodes", "flower", "diagnostics", "plots")),
    *(f"hierfl.{room}" for room in ("methods", "models", "models.families", "guides")),
)


def test_public_names_are_those_that_type_checkers_see() -> None:
    """The stub of each lazy package lists each name once, with a module that has it."""
    for package in map(importlib.import_module, LAZY):
        where = package.__name__
        stub = ast.parse(Path(str(package.__file__)).with_suffix(".pyi").read_text())
        lines = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
        names = [alias.name for line in lines for alias in line.names]
        assert sorted(names) == package.__all__ == sorted(set(names)), where
        for line in lines:
            for alias in line.names:
                name, value = alias.name, getattr(package, alias.name)
                assert alias.asname == name, f"{where}.{name} is hidden from strict type checkers"
                module = ".".join(filter(None, [where, line.module]))
                if isinstance(value, type(hierfl)):
                    assert value is importlib.import_module(f"{module}.{name}"), (where, name)
                else:
                    assert value is getattr(importlib.import_module(module), name), (where, name)
                assert name in dir(package), (where, name)


def test_star_import_and_unknown_names(stages: list[list[str]]) -> None:
    assert not stages[4]
    with pytest.raises(AttributeError, match="No hierfl attribute ft"):
        _ = getattr(hierfl, "ft")  # noqa: B009 (a type checker refuses hierfl.ft)
    with pytest.raises(ImportError, match="cannot import name 'ft' from 'hierfl'"):
        exec("from hierfl import ft")


# ------------------------------------------------------------ ArviZ's announcement
def imports_of(path: Path) -> Iterator[str]:
    text = path.read_text()
    for node in ast.walk(ast.parse(text if "arviz" in text else "")):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_one_module_imports_arviz() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "hierfl").glob("**/*.py")
        if any(name.split(".")[0] == "arviz" for name in imports_of(path))
    }
    for_types = {
        "hierfl/nodes/fit_over_nodes.py",
        "hierfl/posterior/arviz_groups.py",
    }  # under TYPE_CHECKING
    assert found - for_types == {"hierfl/posterior/arviz_io.py"}


DEMO = "import sys; from hierfl.cli import app; app(['demo', '--quick', '--out', sys.argv[1]])"
announces = pytest.mark.skipif(
    not version("arviz").startswith("0.23"), reason="ArviZ 0.23 alone announces version 1"
)


@announces
def test_the_announcement_is_not_shown(fresh: Fresh) -> None:
    """ArviZ writes the day of its last announcement into the user's cache folder, which was empty."""
    assert ANNOUNCED not in fresh.done.stdout + fresh.done.stderr
    assert list(fresh.home.rglob("daily_warning")), "ArviZ no longer keeps its date in this folder"


@announces
@pytest.mark.slow
def test_the_demo_does_not_show_it(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = python(DEMO, str(tmp_path / "out"), **home)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ANNOUNCED not in done.stdout + done.stderr


@announces
@pytest.mark.slow
def test_arviz_announces_itself_without_hierfls_filter(tmp_path: Path) -> None:
    """The control: without hierfl's filter, ArviZ shows its announcement when its cache folder
    is empty.
    """
    fresh = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    assert ANNOUNCED in python("import hierfl, arviz", **fresh).stderr
