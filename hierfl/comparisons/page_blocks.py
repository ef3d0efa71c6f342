"""Blocks of a Markdown page that a program writes, between `<!-- NAME -->` and its end."""

from __future__ import annotations

from pathlib import Path


def put_block(page: Path, name: str, block: str) -> None:
    """Replace what stands on a Markdown page between `<!-- name -->` and `<!-- end of name -->`."""
    text, first, last = page.read_text(), f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, opened, rest = text.partition(first)
    _, closed, after = rest.partition(last)
    if not (opened and closed):
        raise ValueError(f"{page} has no block '{name}': put the lines {first} and {last} into it")
    page.write_text(f"{before}{first}\n{block}\n{last}{after}")
