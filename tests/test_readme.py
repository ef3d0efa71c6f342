"""The Python of the README runs as it stands, with fewer rounds and draws."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hierfl
from hierfl.core.trees import tree_leaves

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(code: str, **names: Any) -> dict[str, Any]:
    """Run a block of the README with fewer rounds and draws; return the names that it defines."""
    small = re.sub(r"rounds=\d+", "rounds=4", re.sub(r"draws=\d+", "draws=10", code))
    small = small.replace("every=100", "every=2").replace("score_every=50", "score_every=2")
    exec(compile(small, "README.md", "exec"), names)
    return names


def test_readme_has_four_blocks() -> None:
    assert len(BLOCKS) == 4


def test_blocks_that_fit_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    code = BLOCKS[0].replace(
        'again = hierfl.load("run/")', 'again = hierfl.load("run/", method=fit.method)'
    )
    names = run(code, __name__="readme")
    assert names["posterior"].posterior["w"].dims == ("chain", "draw", "client", "x")
    assert torch.equal(
        names["again"].predict(names["test"]).mean, names["fit"].predict(names["test"]).mean
    )
    method = hierfl.methods.fedsvi(names["model"], guide=hierfl.guides.structured)
    new, rows = names["test"], names["test"].without("y")
    second = BLOCKS[1 + 1].replace('"run/"', '"run2/"')
    after = run(
        second,
        hierfl=hierfl,
        method=method,
        train=names["train"],
        test=new,
        new_hospitals=new,
        their_rows=rows,
    )
    assert {"elbo", "bytes_up", "seconds", "held_out_log_score"} <= set(after["fit"].history)
    run(BLOCKS[3], hierfl=hierfl, fit=names["fit"], test=names["test"])
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_block_that_writes_a_method() -> None:
    data = hierfl.ClientData.from_arrays(
        [0] * 9 + [1] * 30, x=torch.randn(39, 4), y=torch.arange(39) % 3
    )
    model = hierfl.models.network(nn.Linear(4, 3))
    names = run(BLOCKS[1])
    mine = hierfl.fit(names["fedavg"](model), data, rounds=3)
    theirs = hierfl.methods.fedavg(model, optimiser=hierfl.optimisers.SGD(0.1), steps=5)
    for a, b in zip(
        tree_leaves(mine.message),
        tree_leaves(hierfl.fit(theirs, data, rounds=3).message),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
