"""The site that `make docs` builds: every public name and every method has a page, and examples run."""

import importlib
import json
import re
import tempfile
import tomllib
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import torch

import hierfl
from hierfl.methods.about import names
from hierfl.runs import fit as chosen

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GALLERY = DOCS / "gallery"
QUICK = ("eight_schools", "toy_regression")  # of the gallery
CONFIG = (ROOT / "mkdocs.yml").read_text()


def tool(name: str) -> Any:
    """Return a fixture: a module of docs/tools."""

    @pytest.fixture(scope="module", name=name)
    def module() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(DOCS / "tools")
            return importlib.import_module(name)

    return module


pages, outputs, gallery = tool("pages"), tool("outputs"), tool("gallery")


def test_every_public_name_has_a_page(pages: Any) -> None:
    groups = importlib.import_module("groups")
    there = [name for group in pages.groups() for name in group.names]
    assert len(there) == len(set(there))
    assert not groups.public_names() - set(there)
    assert not {n for n in set(there) - groups.public_names() if not n.startswith(pages.OF_FITS)}
    made = pages.reference()
    for group in pages.groups():
        assert {pages.address(group, name) for name in group.names} <= made.keys()
        assert all(pages.line(name) for name in group.names)


def test_every_method_has_its_equations_and_what_it_reduces_to(pages: Any) -> None:
    written = {word: text for word, text in pages.texts().items() if word != "shared"}
    assert set(written) == set(names())
    for word, text in written.items():
        assert text["reduces"] and text["example"]
        assert "equations" in text or word in ("averaging_some", "by_rows")


@pytest.mark.slow("fedep", "fedlaplace", "pvi", "bfi", "pfedbayes", "by_rows")
@pytest.mark.filterwarnings("ignore::UserWarning")  # two rounds are warned of, rightly
@pytest.mark.parametrize("word", names())
def test_a_methods_example_runs(word: str, pages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(chosen, "ATTEMPTS", (2,))
    monkeypatch.setattr(hierfl.Fit, "summary", lambda fit: fit)  # other tests are of the summary
    few = hierfl.datasets.heart_disease().split(0.15, seed=0)[0]
    monkeypatch.setattr(hierfl.datasets, "heart_disease", lambda: few)
    code = re.sub(r"\b(rounds|steps)=\d+", r"\1=1", pages.example(word))
    exec(compile(code, word, "exec"), {"__name__": "page"})


def run_script(name: str, monkeypatch: pytest.MonkeyPatch, rounds: str = r"\g<0>") -> None:
    """Run a script of the gallery, as users run it or for a few rounds."""
    from matplotlib import pyplot

    torch.set_default_dtype(torch.float32)
    drawn = []
    monkeypatch.chdir(GALLERY)
    monkeypatch.setattr(pyplot, "show", lambda: drawn.append(pyplot.gcf()))
    code = re.sub(r"(\brounds\"?[=:] ?)\d+", rounds, (GALLERY / f"{name}.py").read_text())
    with pyplot.rc_context({"backend": "agg"}):
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    assert drawn and all(figure.axes for figure in drawn)
    pyplot.close("all")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_script_of_the_gallery_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(name, monkeypatch, r"\g<1>2")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", sorted({path.stem for path in GALLERY.glob("*.py")} - set(QUICK)))
def test_a_script_of_the_gallery_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(name, monkeypatch)


def test_the_gallery_is_whole() -> None:
    scripts = sorted(GALLERY.glob("*.py"))
    assert 12 <= len(scripts) <= 16
    for script in scripts:
        text = script.read_text()
        assert f"gallery/{script.stem}.md" in CONFIG
        assert text.startswith("# %% [markdown]\n# # ") and "plt.show()" in text
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            target = link.replace("../reference/", "../../reference/")
            assert link.startswith(("https:", "../reference/")) or (GALLERY / target).exists(), link


def test_every_page_is_in_the_navigation() -> None:
    missing = [p for p in DOCS.rglob("*.md") if p.relative_to(DOCS).as_posix() not in CONFIG]
    assert not missing


def test_nothing_is_fetched_from_elsewhere() -> None:
    for path in (DOCS / "assets").rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?https?:", path.read_text()), path
    assert not re.search(r"https?://", CONFIG)


def test_the_version_is_that_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_what_pages_print_is_kept_and_is_of_the_code_that_stands_there(outputs: Any) -> None:
    pages = outputs.printing()
    stale = [page for page in pages if outputs.stale(page)]
    assert not stale, f"run python docs/tools/outputs.py {' '.join(stale)}"
    assert {file.stem for file in outputs.KEPT.iterdir()} == {Path(page).stem for page in pages}
    for page in pages:
        printed = json.loads(outputs.kept_file(page).read_text())["printed"]
        for code, text in zip(outputs.blocks(page), printed, strict=True):
            assert text or "\nprint(" not in f"\n{code}", code
            assert tempfile.gettempdir() not in text and str(ROOT) not in text


def test_a_change_of_the_code_is_seen(
    outputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "ROOT", tmp_path)
    monkeypatch.setattr(outputs, "KEPT", tmp_path / "docs" / "outputs")
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    text = "```python\nx = 1\n```\n\n```python\nprint(x + 1)\n```\n"
    page.write_text(text)
    assert outputs.printing() == ["page.md"] and outputs.stale("page.md")
    kept = [outputs.Output(), outputs.Output("2")]
    monkeypatch.setattr(outputs, "executed", lambda codes, page: kept[: len(codes)])
    outputs.keep("page.md")
    assert not outputs.stale("page.md")
    made = f'{text}\n```text title="Output"\n2\n```\n'
    assert outputs.with_outputs(text, "page.md") == made
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "new.py").write_text("x = 1")  # of the package
    assert outputs.outdated("page.md") and not outputs.stale("page.md")
    outputs.main([])
    assert outputs.outdated("page.md")
    outputs.main(["--release"])
    assert not outputs.outdated("page.md")
    page.write_text(text.replace("x = 1", "x = 2"))
    assert outputs.stale("page.md") and outputs.with_outputs(text, "page.md") == text


@pytest.mark.slow
def test_blocks_run_one_after_another_in_a_process_of_their_own(outputs: Any) -> None:
    codes = ["x = 1", "print(x + 1)", "from matplotlib import pyplot\npyplot.figure()"]
    nothing, table, figure = outputs.executed(codes, "page.md")
    assert nothing == outputs.Output() and table == outputs.Output("2")
    assert figure.pictures[0].startswith(b"\x89PNG") and not figure.text
    with pytest.raises(NameError, match="missing"):
        outputs.executed(["missing"], "page.md")


def test_outputs_stand_below_the_blocks_that_made_them(outputs: Any) -> None:
    shown = outputs.shown(outputs.Output("a table", [b"a picture"]))
    assert shown.startswith('\n```text title="Output"\na table\n```\n')
    assert b64encode(b"a picture").decode() in shown and outputs.shown(outputs.Output()) == ""
    wide, sentence = "a  table" + 90 * "-", "a sentence " * 10
    assert outputs.as_text(wide) == f'\n```{{.text .wide title="Output"}}\n{wide}\n```\n'
    assert outputs.as_text(sentence).startswith('\n```text title="Output"\n')
    pages = {f"docs/{page}" for page in outputs.EXECUTED} - {"docs/index.md"}
    assert all((ROOT / page).is_file() for page in pages)
    assert CONFIG.count("tutorial") == len(pages)


def test_a_script_of_the_gallery_becomes_a_page(tmp_path: Path, gallery: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text("# %% [markdown]\n# # A title\n#\n# Words.\n\n# %%\nx = 1  # one\n")
    assert gallery.page(script) == "# A title\n\nWords.\n\n\n```python\nx = 1  # one\n```\n"
    for path in GALLERY.glob("*.py"):
        codes = gallery.page(path).count("```python\n")
        assert codes == len(re.findall("^# %%$", path.read_text(), re.MULTILINE))
