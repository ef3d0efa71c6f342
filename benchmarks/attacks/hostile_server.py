"""A server of its own mind: requests to one node, whose owner has set limits, that no honest server sends.

Rounds that say another number, draws under a budget of the rows, mini-batches of one row, beliefs
that single out a row, and questions about the schema that differ in a level or name a column more.
"read" counts requests whose answer rests on fewer rows than the policy asks for, or holds a value of
a row: it must be 0. Run `python -m benchmarks.attacks hostile_server`.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import torch

import hierfl
from hierfl import methods, models
from hierfl.formulas.questions import Question
from hierfl.nodes import Refused
from hierfl.nodes.agreed_schema import answer_schema
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.client_state import Node
from hierfl.nodes.messages import NodeFailed, from_bytes, to_bytes
from hierfl.nodes.node import answer, node
from hierfl.summaries.row_noise import RowNoise

ROWS, LEAST, NAMED = 120, 40, 5  # rows of the node; that an answer must rest on; of a level
TEXT = "y ~ age + sex + (1 | site)"
POLICY = f"min_rows = {LEAST}\nrounds_a_day = 1000\nmin_count = {NAMED}\n"


def rows() -> hierfl.ClientData:
    """Return the node's rows and those of two others."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3 * ROWS, 3, generator=g, dtype=torch.float64)
    y = (torch.rand(3 * ROWS, generator=g) < torch.sigmoid(x.sum(1))).double()
    names = [name for name in ("a", "b", "c") for _ in range(ROWS)]
    return hierfl.ClientData.from_arrays(names, x=x, y=y)


def frame() -> pd.DataFrame:
    """Return a frame whose every age and name is one patient's."""
    g = np.random.default_rng(0)
    rare = [f"patient {k}" for k in range(3)] + ["f", "m"] * (ROWS // 2)
    age = g.normal(50.0, 9.0, len(rare))
    names = [f"name {k}" for k in range(len(rare))]
    return pd.DataFrame(
        {"age": age, "sex": rare, "name": names, "y": age + g.normal(size=len(age))}
    )


class Server:
    """Asks one node, and reads what comes back."""

    def __init__(self, root: Path) -> None:
        data, self.count = rows(), 0
        model: Any = models.regression("bernoulli", prior_scale=dist.HalfNormal(0.5), centered=True)
        noise = RowNoise(epsilon=0.5, delta=1e-4, max_row_norm=3.0, rounds=2)
        kinds = {
            "two_stage": methods.two_stage(model, draws=200),
            "noise": methods.two_stage(model, draws=200, row_noise=noise),
        }
        self.by_row = methods.fedsvi(model, batch_size=1)
        parts = [data.select([name]) for name in data.names]
        self.part, self.root = parts[0], root
        self.agreement = Agreement.between([Introduction.of(part) for part in parts])
        self.nodes: dict[str, Node] = {}
        for kind, method in kinds.items():
            self.start(kind, method)
        self.x = torch.cat([data.select(["a"]).fields["x"], torch.ones(ROWS, 1)], 1).double()
        self.rows, self.noisy, self.schemas = frame(), 0, root / "schema"
        self.schemas.mkdir()
        (self.schemas / "policy.toml").write_text(POLICY)
        self.formula = hierfl.formula(TEXT, clients="site")
        known = {"a": self.rows, "b": self.rows[3:]}
        self.schema = hierfl.schema(
            known, self.formula, levels={"sex": sorted(set(known["a"].sex))}
        )
        self.answered: dict[str, str] = {}

    def start(self, kind: str, method: hierfl.Method) -> None:
        """Let the node's owner start a run of a method."""
        folder = self.root / kind
        folder.mkdir(exist_ok=True)
        (folder / "policy.toml").write_text(POLICY)
        self.nodes[kind] = node(method, self.part, self.agreement, folder)

    def sent(self, kind: str, how: random.Random) -> dict[str, Any]:
        """Return the message that the node's own server sends first."""
        server = self.nodes[kind].federation.server
        return dict(server.down(server.state, hierfl.method.Clock(0, 2)))

    def ask(self, kind: str, message: Any, round_: int) -> Any:
        """Return the update of a node."""
        about = {"run": self.nodes[kind].run, "round": round_, "counted": -1}
        asked = to_bytes({"message": message, "mail": {}}, about)
        return from_bytes(answer(self.nodes[kind], asked), most=1 << 24).tree

    # ------------------------------------------------------------ what is tried
    def isolating(self, how: random.Random) -> bool:
        """Set the belief so that one row's curvature is all; return whether the node answers."""
        message = self.sent("two_stage", how)
        row = self.x[how.randrange(ROWS)]
        g = torch.Generator().manual_seed(how.randrange(1 << 30))
        away = torch.randn(len(row), generator=g, dtype=torch.float64)
        size = len(message["loc"])
        loc = torch.zeros(size, dtype=torch.float64)
        along = away - row * (away @ row) / (row @ row)  # 0 at the row, steep elsewhere
        loc[: len(row)] = 10.0 ** how.uniform(1.5, 5) * along
        narrow = 10.0 ** how.uniform(-9, -4) * torch.eye(size, dtype=torch.float64)
        up = self.ask("two_stage", {**message, "loc": loc, "covariance": narrow}, how.randrange(99))
        values = torch.linalg.eigvalsh(up["factor"][0]["precision"][0])
        return bool(values[-1] > 0.0) and bool(values[-2] < 1e-3 * values[-1])

    def forged(self, how: random.Random) -> bool:
        """Ask for a round under a budget; return whether one more is answered than it pays for."""
        message = self.sent("noise", how)
        if how.random() < 0.5:
            z = torch.randn(4, len(message["loc"]), dtype=torch.float64)
            self.ask("noise", {**message, "draws": z}, how.randrange(3))
            return True
        moved = {**message, "loc": message["loc"] + 0.1 * how.randrange(1, 99)}
        self.ask("noise", moved, how.randrange(200))
        self.noisy += 1
        return self.noisy > 2

    def one_row(self, how: random.Random) -> bool:
        """Ask for the gradient of a mini-batch of one row."""
        self.start("fedsvi", self.by_row)
        self.ask("fedsvi", self.sent("fedsvi", how), how.randrange(200))
        return True

    def crafted(self, how: random.Random) -> bool:
        """Send a message of another form."""
        message = self.sent("two_stage", how)
        wrong: list[dict[str, Any]] = [
            {**message, "z": torch.zeros(9)},
            {**message, "covariance": -message["covariance"]},
            {k: v for k, v in message.items() if k != "loc"},
            {**message, "loc": message["loc"].float()},
            {**message, "draws": torch.zeros(201, len(message["loc"]), dtype=torch.float64)},
        ]
        self.ask("two_stage", how.choice(wrong), how.randrange(99))
        return True

    def question(self, how: random.Random) -> bool:
        """Ask about columns and levels of the server's choice; return whether a row was told."""
        levels = [*dict.fromkeys(self.rows.sex)]
        some = tuple(how.sample(levels, how.randrange(1, len(levels))))
        column = replace(self.schema.columns["sex"], levels=some)
        more = {"name": replace(column, levels=("name 0",))}
        columns = {**self.schema.columns, "sex": column, **how.choice([{}, more])}
        schema = replace(self.schema, min_count=how.choice([1, 5]), columns=columns)
        asked = how.choice(
            [
                Question("design", schema=schema),
                Question("outside", by=(how.choice(["sex", "name", "age"]),), levels=some),
                Question("groups", how.choice([1, 5]), by=("name",)),
                Question("columns", how.choice([1, 5])),
                Question("rows"),
            ]
        )
        content = asked.json().encode()
        given = answer_schema(self.formula, {"a": self.rows}, self.schemas, content).decode()
        place = json.dumps([asked.kind, asked.by])
        another = self.answered.setdefault(place, given) != given
        return another or self.tells_a_row(given)

    def tells_a_row(self, text: str) -> bool:
        """Return whether a text holds a value of a patient, or a level that few have."""
        few = [f"{v}" for v in self.rows.name] + ["patient 0", "patient 1", "patient 2"]
        ages = [repr(float(v)) for v in self.rows.age]
        return any(word in text.replace('"name"', "") for word in (*few, *ages))

    def read(self, kind: str, how: random.Random) -> str:
        """Send one request, and say "refused", "right" (a harmless answer), "wrong" or "raw"."""
        try:
            return "wrong" if getattr(self, kind)(how) else "right"
        except (Refused, NodeFailed) as error:
            return "wrong" if self.tells_a_row(str(error)) else "refused"
        except Exception as error:
            print(f"{kind}: {type(error).__name__}: {error}", file=sys.stderr)
            return "raw"


KINDS = ("isolating", "forged", "one_row", "crafted", "question", "question")


def attack(n: int = 200, seed: int = 0) -> dict[str, int]:
    """Send n requests, and count what became of them; "wrong" counts rows that were read."""
    counts, how = dict.fromkeys(("right", "refused", "wrong", "raw"), 0), random.Random(seed)
    dtype = torch.get_default_dtype()
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_default_dtype(torch.float64)
        try:
            server = Server(Path(root))
            for k in range(n):
                kind = KINDS[k % len(KINDS)]
                found = server.read(kind, how)
                counts[found] += 1
                if found == "wrong":
                    print(f"request {k}, {kind}: a row was read", file=sys.stderr)
        finally:
            torch.set_default_dtype(dtype)
    return counts
