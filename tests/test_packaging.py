"""The wheel and the sdist hold every file once, and no module can be imported under a second
name.
"""

import doctest
import importlib
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in SETUPTOOLS["package-dir"]
    for path in ROOT.joinpath(*folder.split(".")).glob("*.py")
)


def test_pyproject_names_every_package_folder() -> None:
    inside = ROOT / "hierfl"
    folders = {"hierfl"} | {
        f"hierfl.{'.'.join(p.parent.relative_to(inside).parts)}"
        for pattern in ("*/__init__.py", "*/*/__init__.py")
        for p in inside.glob(pattern)
    }
    assert set(SETUPTOOLS["packages"]) == folders == set(SETUPTOOLS["package-dir"])
    listed = {(ROOT / folder).resolve() for folder in SETUPTOOLS["package-dir"].values()}
    code = {
        p.parent for name in ("hierfl", "models", "guides") for p in (ROOT / name).rglob("*.py")
    }
    assert code <= listed, "a folder below a package needs a line in pyproject's `packages`"


def test_the_package_dirs_equal_the_symlink_targets() -> None:
    for name, folder in SETUPTOOLS["package-dir"].items():
        assert (ROOT / folder).resolve() == ROOT.joinpath(*name.split(".")).resolve()


def test_every_module_imports() -> None:
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise AssertionError(f"{name} cannot be imported") from error


@pytest.mark.parametrize("name", ["models", "guides"])
def test_the_top_level_folder_is_not_a_second_package(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / name / "__init__.py")
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=f"import hierfl.{name}, not the folder {name}/"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert importlib.import_module(f"hierfl.{name}").__name__ == f"hierfl.{name}"


def test_the_wheel_holds_all_files_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("hierfl", "models", "guides"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    # Call the back end itself, not `pip wheel`: this needs no isolated environment and no package
    # index.
    build = f"import setuptools.build_meta as b; b.build_sdist({str(tmp_path)!r}); b.build_wheel({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in inside} == {"hierfl"}
    assert len(names) == len(set(names))
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        assert any(
            name.count("/") == 1 and name.endswith("/LICENSE") for name in archive.getnames()
        )
    expected = {
        f"{name.replace('.', '/')}.py"
        for name in MODULES
        if not (ROOT / name.replace(".", "/")).is_dir()
    }
    expected |= {f"{name.replace('.', '/')}/__init__.py" for name in SETUPTOOLS["packages"]}
    stubs = {
        f"{name.replace('.', '/')}/__init__.pyi"
        for name in SETUPTOOLS["packages"]
        if (ROOT / name.replace(".", "/") / "__init__.pyi").exists()
    }
    shipped = {
        f"hierfl/{room}/shipped/{p.name}"
        for room in ("datasets", "studies")
        for p in (ROOT / "hierfl" / room / "shipped").iterdir()
    }
    expected |= {"hierfl/py.typed"} | stubs | shipped
    assert "hierfl/studies/shipped/ood-entropy.toml" in inside
    expected |= {
        f"hierfl/flower/template/{p.name}" for p in (ROOT / "hierfl/flower/template").iterdir()
    }
    pages = {"hierfl/report/page.html", "hierfl/cli/officer_page.html"}
    assert inside == expected | pages | {"hierfl/comparisons/published.csv"}


def test_the_doctests_hold() -> None:
    torch.set_default_dtype(torch.float32)  # as users have it
    tried = 0
    for module in map(importlib.import_module, MODULES):
        if ">>> " not in Path(str(module.__file__)).read_text():
            continue  # to look for examples in every object takes seconds
        found = doctest.testmod(module)
        assert not found.failed, module
        tried += found.attempted
    assert tried > 60
