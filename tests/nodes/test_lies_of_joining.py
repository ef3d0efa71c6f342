"""One of four nodes that join a fit lies in a field of an answer: the three others join, and the liar is named."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

import hierfl
from benchmarks.attacks.lying_nodes import LIAR, NAMES
from hierfl.core.trees import named_leaves
from hierfl.nodes import Answer, FitOverNodes, Reached, gathering
from hierfl.nodes.messages import from_bytes, to_bytes
from hierfl.nodes.run import without_rows
from hierfl.nodes.stations import station
from hierfl.nodes.updates import WHY
from tests.nodes.lies import JSON_LIES, PLAUSIBLE, first_as, lies_of, places, replaced

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY = bool(os.environ.get("HIERFL_SLOW"))
BEFORE = ("center", "coast", "hill", "plain")  # clients of the fit that the others join
KINDS = ("introduce", "agree", "log ratios", "factor")  # of answers
CASES = [*(("bernoulli", kind) for kind in KINDS), ("gaussian", "factor")]


class LeftOut(Exception):
    """The others go on without the liar."""


class Joining:
    """Four nodes that join a fit of four, of which one can lie in one answer; honest ones are computed once."""

    def __init__(self, family: Any, folder: Path) -> None:
        g = torch.Generator().manual_seed(0)
        x = torch.randn(240, 2, generator=g)
        y = x.sum(1) + torch.randn(240, generator=g)
        y = (y > 0).double() if family == "bernoulli" else y
        names = [name for name in (*BEFORE, *NAMES) for _ in range(30)]
        data = hierfl.ClientData.from_arrays(names, x=x, y=y)
        model: Any = hierfl.models.regression(family, centered=True)
        self.method = hierfl.methods.two_stage(model, draws=200)
        self.stations = {
            name: station(self.method, data.select([name]), folder / name) for name in data.names
        }
        self.answers: dict[tuple[str, str, bytes], bytes] = {}
        self.agreed: dict[str, bytes] = {}  # what each node was last sent of a run
        self.run_of: dict[str, bytes] = {}  # the run that each node itself is in

    def honest(self, name: str, kind: str, content: bytes) -> bytes:
        if kind == "agree":
            self.agreed[name] = content
        if (name, kind, content) not in self.answers:
            if kind == "round":  # of a run that others may have followed since
                self.agree(name)
            self.answers[name, kind, content] = self.stations[name].reply(kind, content)
            self.run_of[name] = content if kind == "agree" else self.run_of.get(name, b"")
        return self.answers[name, kind, content]

    def agree(self, name: str) -> None:
        """Bring a node back to the run of which it was last sent, for which it reads its rows again."""
        if self.run_of.get(name) != self.agreed[name]:
            self.stations[name].reply("agree", self.agreed[name])
            self.run_of[name] = self.agreed[name]

    def reached(
        self, names: Any, to: str = "", lie: bytes | None = b"", *, whole: bool = True
    ) -> Reached:
        """Return nodes, of which the liar lies in answers of a kind; the run ends where it goes on without it."""

        def send(kind: str, contents: Mapping[Any, bytes]) -> Iterator[Answer]:
            if not whole and kind != "introduce" and {*contents} == {*NAMES} - {LIAR}:
                raise LeftOut
            for name, content in contents.items():
                try:
                    answer = self.honest(name, kind, content)
                except ValueError as error:  # of a node that has said another name
                    yield Answer(name, None, str(error))
                    continue
                is_lie = name == LIAR and to == self.what(kind, answer)
                yield Answer(name, lie if is_lie else answer)

        return Reached(send, names)

    @staticmethod
    def what(kind: str, answer: bytes) -> str:
        """Return which of `KINDS` an answer is."""
        if kind != "round":
            return kind
        tree = from_bytes(answer, most=1 << 24).tree
        return "log ratios" if "log_ratios" in tree else "factor"

    @cached_property
    def before(self) -> FitOverNodes:
        return hierfl.nodes.fit(self.method, self.reached(BEFORE))

    def updated(self, to: str = "", lie: bytes | None = b"", **how: bool) -> FitOverNodes:
        """Return the fit that the others join, as the liar lies in an answer of a kind."""
        updated: FitOverNodes = self.before.updated(self.reached(NAMES, to, lie, **how))
        return updated

    def told(self, kind: str) -> bytes:
        """Return the liar's honest answer of a kind in the run of all."""
        if not any(of[0] == LIAR for of in self.answers):
            self.updated()
        own = [(of[1], answer) for of, answer in self.answers.items() if of[0] == LIAR]
        return next((a for asked, a in own if self.what(asked, a) == kind), b"")


@pytest.fixture(scope="module")
def joining(tmp_path_factory: Any) -> Callable[[str], Joining]:
    return cache(lambda family: Joining(family, tmp_path_factory.mktemp(family)))


def lies(kind: str, honest: bytes) -> Iterator[tuple[str, bytes, bool]]:
    """Yield lies in place of an answer with their names, and whether nobody can know of them."""
    if kind in ("factor", "log ratios"):
        for what, content in lies_of(honest):
            yield what, content, content == honest or what.endswith(PLAUSIBLE)
        return
    told = json.loads(honest)
    for path in places(told):
        for lie in JSON_LIES:
            said = replaced(told, path, lie)
            is_word = path in (("client",), ()) or (kind == "agree" and lie == "one too many")
            yield f"{path} {lie}", json.dumps(said).encode(), said == told or is_word


@pytest.mark.slow(
    "bernoulli-introduce", "bernoulli-agree", "bernoulli-log ratios", "gaussian-factor"
)
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_lie_of_one_that_joins_is_not_silent_and_ends_nothing(
    family: str, kind: str, joining: Callable[[str], Joining]
) -> None:
    four = joining(family)
    every, heard = list(lies(kind, four.told(kind))), []
    for what, lie, is_plausible in every if EVERY else every[:: len(every) // 3]:
        try:
            four.updated(kind, lie, whole=False)
        except LeftOut:
            continue
        except Exception as error:
            heard.append((what, str(error)[:200]))
            continue
        if not is_plausible:
            heard.append((what, "silent"))
    assert heard == []


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), CASES[-2:])
def test_the_others_join_as_if_the_liar_were_not_there(
    family: str, kind: str, joining: Callable[[str], Joining]
) -> None:
    four = joining(family)
    assert four.told(kind)
    updated, silent = four.updated(kind, b"a lie"), four.updated("introduce", None)
    assert [of["client"] for of in updated.progress.history[-1]["left_out"]] == [LIAR]
    assert updated.clients == silent.clients == tuple(sorted({*BEFORE, *NAMES} - {LIAR}))
    here, there = named_leaves(updated.message), named_leaves(silent.message)
    for name, value in here.items():
        torch.testing.assert_close(value, there[name], atol=1e-6, rtol=0.0)


def test_what_moves_the_posterior_for_one_alone_ends_no_others_joining(
    joining: Callable[[str], Joining],
) -> None:
    """Other rows could have such log ratios, with which the draws do not suffice."""
    four = joining("bernoulli")
    tree, about = from_bytes(four.told("log ratios"), most=1 << 24)
    ratios = first_as(0.0)(tree["log_ratios"][0])
    lie = to_bytes({**tree, "log_ratios": (ratios, *tree["log_ratios"][1:])}, about)
    updated = four.updated("log ratios", lie)
    (out,) = updated.progress.history[-1]["left_out"]
    assert out["client"] == LIAR and "k-hat is" in out["reason"]


def test_a_server_that_fails_with_one_that_joins_goes_on_with_the_others(
    joining: Callable[[str], Joining], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that no check refuses may still be one with which no posterior can be computed."""

    def failing(*how: Any) -> Any:
        everyone, *others = without_rows(*how)

        def update(state: Any, means: Any, clock: Any) -> Any:
            if clock.clients == len(NAMES):
                raise ValueError("the four together are no posterior")
            return everyone.server.update(state, means, clock)

        return replace(everyone, server=replace(everyone.server, update=update)), *others

    monkeypatch.setattr(gathering, "without_rows", failing)
    updated = joining("bernoulli").updated()
    (out,) = updated.progress.history[-1]["left_out"]
    assert out["reason"] == WHY
    assert {*updated.clients} == {*BEFORE, *NAMES} - {out["client"]}
