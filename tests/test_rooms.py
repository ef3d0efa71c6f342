"""The packages of hierfl import in one direction, type-only imports included; each has a folder
in tests/.
"""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
(CONTRACT,) = LINTER["contracts"]
# Room -> its level, 0 at the bottom. Rooms of one level do not import each other.
LEVELS = {
    room: level
    for level, layer in enumerate(reversed(CONTRACT["layers"]))
    for room in layer.split(" | ")
}


def room_of(module: str) -> str | None:
    """Return the room of a module, or None for hierfl itself and for other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == "hierfl" and len(parts) > 1 else None


def imports_for_types(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and module of each import below `if TYPE_CHECKING:`."""
    for block in ast.walk(tree):
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING"):
            for node in (inner for line in block.body for inner in ast.walk(line)):
                if isinstance(node, ast.Import):
                    yield from ((node.lineno, alias.name) for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module == "hierfl":
                    yield from ((node.lineno, f"hierfl.{alias.name}") for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    yield node.lineno, node.module


def test_each_room_imports_only_from_those_below() -> None:
    # of its own: the linter's console keeps the output of the test that ran when it was imported
    code = (
        "import sys; from importlinter.cli import lint_imports\n"
        "sys.exit(lint_imports(no_cache=True, no_logo=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_contract_names_every_room() -> None:
    assert not LINTER.get("exclude_type_checking_imports")
    assert CONTRACT["exhaustive"] and "ignore_imports" not in CONTRACT
    found = {path.stem for path in (ROOT / "hierfl").glob("*.py")} | packages()
    assert set(LEVELS) == found - {"__init__", *CONTRACT["exhaustive_ignores"]}


def test_no_type_only_import_goes_up() -> None:
    upward = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sorted((ROOT / "hierfl").glob("*/*.py"))
        if "TYPE_CHECKING" in (text := path.read_text())
        for line, module in imports_for_types(ast.parse(text))
        if (room := room_of(module)) is not None
        and room != path.parent.name
        and LEVELS[room] >= LEVELS[path.parent.name]
    ]
    assert not upward, "\n".join(upward)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Inside rooms too, and type-only imports included."""
    graph = grimp.build_graph("hierfl", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError, which names the circle


def packages() -> set[str]:
    return {path.parent.name for path in (ROOT / "hierfl").glob("*/__init__.py")}


def test_tests_have_a_folder_for_each_room() -> None:
    folders = {
        path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("*.py"))
    }
    assert folders == packages() | {"benchmarks", "recipes"}


def test_no_two_classes_have_one_name() -> None:
    """A reader who finds a class by its name finds the right one."""
    homes: dict[str, list[str]] = {}
    for room in ("hierfl", "models", "guides"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for name in re.findall(r"^ *class (\w+)[(:]", path.read_text(), re.MULTILINE):
                homes.setdefault(name, []).append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in homes.items() if len(set(paths)) > 1}
    assert not twice, twice
