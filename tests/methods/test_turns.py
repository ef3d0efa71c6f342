"""A phase says how often its steps go through rows: what an option adds to their reads, it adds to `Phase.passes`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_all_functorch_interpreters

from hierfl import ClientBatch, Clock, Method, read
from hierfl.core.trees import tree_map
from hierfl.engine import chunks
from hierfl.engine.federation import federate
from hierfl.program.sites import recipe_of
from tests.methods.cases import METHODS, counted_options
from tests.programs import federation
from tests.sampled import sampled

MANY = 40  # in place of the 1 to 5 of the cases
OPTIONS = {
    f"{name}: {option}": (make, option)
    for name, make in METHODS.items()
    for option in counted_options(make())
}
QUICK = ("fedivon: draws", "fedwba: particles", "ifca: clusters")


class Read(dict[str, Any]):
    """Fields of rows that count how often they are read, under each `torch.vmap` once for each of its calls."""

    reads = 0

    def __getitem__(self, name: str) -> Any:
        times = 1
        for level in retrieve_all_functorch_interpreters():
            times *= level.batch_size() if isinstance(level, VmapInterpreter) else 1
        Read.reads += times
        return super().__getitem__(name)

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


def reads_and_passes(method: Method, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return how often a client reads a field of its rows in a round, and the passes that its phases state."""
    data = federation((12, 12)).select(["north"])
    whole = federate(method, data, seed=0, program=read(method.model, method.guide, data, seed=0))
    server, client = whole.server, whole.client
    own = client.own
    if server.mail is not None:
        own = client.with_mail(own, tree_map(lambda v: v[0], server.mail(server.state)))
    message = server.down(server.state, Clock(0, 1, 1))

    def counting(make: Callable[..., ClientBatch]) -> Callable[..., ClientBatch]:
        def made(*args: Any) -> ClientBatch:
            batch = make(*args)
            return replace(batch, fields=Read(batch.fields))

        return made

    Read.reads = 0
    with monkeypatch.context() as patched:
        for name in ("one_slot", "batch_of"):
            patched.setattr(chunks, name, counting(getattr(chunks, name)))
        at_first = tree_map(lambda v: v[None], own)
        chunks.client_round(whole, client.phases, message, at_first, torch.zeros(1).long(), 0)
    return Read.reads, sum(phase.passes(12) for phase in client.phases)


def with_options(method: Method, options: Mapping[str, Any]) -> Method:
    recipe = recipe_of(method)
    assert recipe is not None
    again: Method = replace(recipe, options={**recipe.options, **options}).again()
    return again


@pytest.mark.parametrize("name", sampled(OPTIONS, QUICK))
def test_what_an_option_adds_to_reads_it_adds_to_passes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, option = OPTIONS[name]
    few, stated_few = reads_and_passes(make(), monkeypatch)
    try:
        larger = with_options(make(), {option: MANY})
    except ValueError as error:
        pytest.skip(str(error))
    many, stated_many = reads_and_passes(larger, monkeypatch)
    # a Newton step reads rows a few times more than others
    assert few and many / few <= 4.0 * stated_many / stated_few
