"""The pages of the API reference: one a public name, from its docstring; one a group; an overview."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from groups import Group, groups

from hierfl.methods.about import HEADINGS, About, Wrapper

WRITTEN = Path(__file__).with_name("methods.toml")


# Modules of functions that are methods of a fit, and of what they return.
OF_FITS = (
    "hierfl.effects.",
    "hierfl.runs.",
    "hierfl.posterior.",
    "hierfl.report.page.",
)


def address(group: Group, name: str) -> str:
    """Return the path of a name's page in docs/."""
    return f"reference/{group.word}/{short(name).removeprefix(f'{group.word}.')}.md"


def reference() -> dict[str, str]:
    """Return every page of the reference: path in docs/ -> Markdown."""
    made = {"reference/index.md": overview()}
    for group in groups():
        made[f"reference/{group.word}/index.md"] = page_of_group(group)
        made |= {address(group, name): page(name) for name in group.names}
    return made


def overview() -> str:
    """Return the page that lists all names."""
    lines = [
        "# API reference\n\nEvery public name has a page, made from its docstring.\n"
    ]
    for group in groups():
        lines.append(
            f"## [{group.title}]({group.word}/index.md)\n\n{group.about}\n"
        )
        links = (
            f"[`{short(name)}`]({address(group, name)[len('reference/') :]})"
            for name in group.names
        )
        lines.append(" · ".join(links) + "\n")
    return "\n".join(lines)


def page_of_group(group: Group) -> str:
    """Return the page of a group: each name with a line about it."""
    lines = [f"# {group.title}\n\n{group.about}\n"]
    for title, names in group.parts.items():
        rows = [
            f"| [`{short(name)}`]({Path(address(group, name)).name}) | {line(name)} |"
            for name in names
        ]
        lines.append(
            "\n".join([f"## {title}\n", "| | |", "|---|---|", *rows, ""])
        )
    return "\n".join(lines)


def page(name: str) -> str:
    """Return the page of a public name."""
    value = object_of(name)
    about = getattr(value, "__about__", None)
    if isinstance(about, About):
        return page_of_method(name, about)
    if isinstance(about, Wrapper):
        return page_of_wrapper(name, about)
    return f"# {short(name).rpartition('.')[2]}\n\n`{import_of(name)}`\n\n{contents(name)}"


def page_of_method(name: str, about: About) -> str:
    """Return a method's page: its box, equation, what crosses, an example, and its docstring."""
    word = name.rpartition(".")[2]
    written = texts()[word]
    box = "\n".join(
        f"    | {heading} | {escaped(getattr(about, field))} |"
        for field, heading in HEADINGS.items()
        if field != "source" and getattr(about, field)
    )
    return f"""# {word}

Infers {about.infers}.

!!! abstract "At a glance"

    | | |
    |---|---|
{box}

## Equations

{equations(written["equations"])}

Source: {linked(about.source) or "hierfl's baseline"}.

{plain_text(name)}

## What it sends

| | |
|---|---|
| every client of a cohort receives | {escaped(about.down)} |
| a client sends | {escaped(about.up)} |
| a client keeps | {escaped(about.kept)} |

An asterisk marks what is weighted by the number of rows. See [what each method sends](../../crossing.md).

## What it reduces to

{written["reduces"].strip()}

## Example

```python
{example(word)}
```

{contents(name)}"""


def page_of_wrapper(name: str, about: Wrapper) -> str:
    """Return a wrapper's page."""
    word = name.rpartition(".")[2]
    written = texts()[word]
    equation = (
        equations(written["equations"]) if "equations" in written else ""
    )
    adds = re.sub(r"\]\((\w+)\.md", r"](../../\1.md", about.adds)
    return f"""# {word}

`{word}{about.call}`: {adds}.

{equation}

{plain_text(name)}

## What it reduces to

{written["reduces"].strip()}

## Example

```python
{example(word)}
```

{contents(name)}"""


@cache
def texts() -> dict[str, Any]:
    """Return what methods.toml says of each method: equations, what it reduces to, an example."""
    return tomllib.loads(WRITTEN.read_text())


def example(word: str) -> str:
    """Return the example of a method, which runs as it stands."""
    shared = texts()["shared"]
    own = texts()[word]
    return (
        shared[own.get("on", "network")].strip()
        + "\n\n"
        + own["example"].strip()
    ).strip()


def equations(text: str) -> str:
    """Return LaTeX as display math: a block is split at its wide spaces, so that it fits a phone."""
    blocks = []
    for block in text.strip().split("\n\n"):
        rows = block.replace(
            r"\qquad \text{or} \qquad", r"\qquad \text{or } "
        ).split(r"\qquad")
        blocks += [row.strip().removesuffix(",") for row in rows]
    return "\n\n".join(f"$$\n{block}\n$$" for block in blocks)


def plain_text(name: str) -> str:
    """Return the docstring of the name's file, folded: the algorithm in plain text."""
    about = (
        inspect.getdoc(importlib.import_module(object_of(name).__module__))
        or ""
    )
    text = "\n".join(f"    {row}".rstrip() for row in about.splitlines())
    title = (
        "In plain text: the algorithm, its source, and where hierfl differs"
    )
    return f'??? note "{title}"\n\n    ```text\n{text}\n    ```'


def contents(name: str) -> str:
    """Return what mkdocstrings makes of a name, or the value of a constant."""
    value = object_of(name)
    if not hasattr(value, "__qualname__") and not hasattr(
        value, "__module__"
    ):
        return f"```python\n{short(name)} = {value!r}\n```\n"
    options = {
        "heading_level": 2,
        "show_root_heading": "true",
        "show_root_toc_entry": "true",
    }
    options |= {"heading": '"Signature"', "toc_label": '"Signature"'}
    lines = [
        f"::: {defined(name)}",
        "    options:",
        *(f"      {k}: {v}" for k, v in options.items()),
    ]
    return "\n".join(lines) + "\n"


def object_of(name: str) -> Any:
    """Return what a full name names."""
    module, _, word = name.rpartition(".")
    return getattr(
        importlib.import_module(
            module.replace("hierfl.partition", "hierfl.data.partition")
        ),
        word,
    )


def defined(name: str) -> str:
    """Return the module in which a name is defined, and the name there."""
    value = object_of(name)
    return f"{value.__module__}.{name.rpartition('.')[2]}"


def import_of(name: str) -> str:
    """Return the line that imports a name, or how it is called after `import hierfl`."""
    module, _, word = name.rpartition(".")
    if name.startswith(OF_FITS) and word.islower():
        return f"hierfl.Fit.{word}"
    if name.startswith(
        (
            "hierfl.effects.",
            "hierfl.flower.",
            "hierfl.formulas.",
            "hierfl.report.",
        )
    ):
        return f"from {module} import {word}"
    return name


def short(name: str) -> str:
    """Return a name as the reference lists it."""
    word = name.rpartition(".")[2]
    if name.startswith(OF_FITS):
        return f"Fit.{word}" if word.islower() else word
    return name.removeprefix("hierfl.")


def line(name: str) -> str:
    """Return the first sentence of a docstring, for a table."""
    value = object_of(name)
    if isinstance(value, tuple):
        return "Constants of the plots."
    return escaped(
        (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    )


def escaped(text: str) -> str:
    """Return text for a cell of a table."""
    return text.replace("*", r"\*").replace("|", r"\|").replace("<", "&lt;")


def linked(source: str) -> str:
    """Return a source with links to arXiv and DOIs."""
    source = re.sub(
        r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", source
    )
    return re.sub(
        r"doi:(10\.[^\s,;]+)", r"[doi:\1](https://doi.org/\1)", source
    )
