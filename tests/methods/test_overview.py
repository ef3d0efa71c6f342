"""The tables of all methods are those of the code, and name the papers that the files name."""

import inspect
import re
import sys

from typer.testing import CliRunner

from benchmarks.method_tables import outdated
from hierfl import methods
from hierfl.cli import app
from hierfl.methods.about import About, described


def test_the_tables_of_the_docs_are_up_to_date() -> None:
    assert not outdated(), "python -m benchmarks.method_tables --write"


def test_papers_are_those_of_the_files() -> None:
    for name, about in described(About).items():
        module = sys.modules[inspect.unwrap(getattr(methods, name)).__module__]
        for number in re.findall(r"arXiv:\d+\.\d+|doi:\S+", about.source):
            assert number in (module.__doc__ or ""), (name, number)


def test_methods_with_a_posterior_come_first() -> None:
    points = [about.guide.startswith("points") for about in described(About).values()]
    assert points == sorted(points) and set(points) == {False, True}


def test_the_command_prints_every_method() -> None:
    printed = CliRunner().invoke(app, ["methods"])
    assert printed.exit_code == 0
    assert all(name in printed.output for name in described(About))
