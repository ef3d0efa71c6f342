"""What every method sends is what its case lists and what it says, and nothing local."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientData, Clock, Method, Share
from hierfl.core.trees import named_leaves, tree_leaves
from hierfl.engine.chunks import client_round
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin
from hierfl.method import Each
from hierfl.methods.about import About, described, names
from tests.methods.cases import CASES, CROSSES, Shapes, first_word
from tests.programs import FAMILIES, federation

STATES = {  # what a client of a hierarchy keeps: its own factor and mode
    "bfi": set(),
    "fedep": {"shift", "precision", "mode", "slope", "loc"},
    "fedep shared": set(),
    "fedlaplace": {"mode", "slope", "loc"},
    "pvi": {"shift", "precision", "mode", "slope", "loc"},
    "two_stage": {"precision", "shift", "seen"},
}
LISTED = {name: case.up for name, case in CASES.items() if case.up is not None}


def exchange(method: Method, data: ClientData) -> tuple[Any, dict[str, Any], Any, hierfl.Program]:
    """Return the message, the update, the new client state and the program of a first round."""
    federation_ = federate(method, data)
    start = begin(federation_)
    message = federation_.server.down(start.server, Clock(0, 1))
    ids = torch.arange(data.num_clients)
    up, kept = client_round(federation_, federation_.client.phases, message, start.table, ids, 0)
    return message, up, kept, federation_.program


def shapes(tree: Any, *, skip: int = 0) -> Shapes:
    """Return shapes by the last name of each tensor's path, without the leading `skip` dimensions."""
    return {last_name(path): tuple(leaf.shape[skip:]) for path, leaf in named_leaves(tree).items()}


def last_name(path: str) -> str:
    """Return the last key or field of a path such as `.at.params['a.loc']`."""
    return path.rsplit("'", 2)[-2] if path.endswith("']") else path.rsplit(".", 1)[-1]


def names_of_local_things(program: hierfl.Program) -> set[str]:
    """Return the names of a program's local params and sites."""
    params = {spec.name for spec in program.params if spec.is_local}
    return params | {site.name for site in program.latents.local_block.sites}


def test_every_method_wrapper_and_guide_has_a_case() -> None:
    """A method without a case is in no test that goes over all methods."""
    assert {first_word(name) for name in CASES} == set(names())
    assert {first_word(name) for name in LISTED} == set(described(About)), "list what they send"
    assert set(CROSSES) | {"structured_flow"} == set(FAMILIES)


@pytest.mark.slow("fedep shared", "pvi", "fedep", "bfi", "fedlaplace")
@pytest.mark.parametrize("name", LISTED)
def test_a_client_sends_what_its_method_says(name: str) -> None:
    """Names, shapes and weights; whether the server sees single clients; nothing local."""
    method, about = CASES[name].make(), described(About)[first_word(name)]
    data = federation((20, 9, 31))  # no size of a tensor that crosses is a number of rows
    down, up, kept, program = exchange(method, data)
    found = {
        share: tuple(of.value.shape[1:])
        if isinstance(of.value, Tensor)
        else shapes(of.value, skip=1)
        for share, of in up.items()
    }
    assert found == LISTED[name]
    assert not {20, 9, 31, 60} & {size for leaf in tree_leaves(down) for size in leaf.shape}
    local = names_of_local_things(program)
    paths = [*named_leaves(down), *named_leaves(up)]
    assert not [path for path in paths if any(f"'{own}'" in path for own in local)]
    alone = any(isinstance(of, Each) for of in up.values())
    assert method.discloses == about.discloses == ("summaries" if alone else "sums")
    assert set(re.findall(r"`(\w+)`", about.up)) == set(up)
    counts = data.counts
    for share, starred in re.findall(r"`(\w+)`(\*?)", about.up):
        sent_ = up[share]
        if isinstance(sent_, Each):
            assert not starred, f"{share}: it is in no mean, and has no weight"
            continue
        weight = sent_.weight if isinstance(sent_, Share) else sent_.log_weight.exp()
        assert isinstance(weight, Tensor)
        assert weight.shape == (3,), "each share has one weight per client"
        by_rows = torch.allclose(weight, counts.to(weight))
        assert by_rows == bool(starred), f"{share}: is it weighted by rows?"
    if name in STATES:
        assert set(shapes(kept)) <= STATES[name]
    if name == "two_stage":
        assert not shapes(down), "a Gaussian likelihood needs no belief of the server"
    if about.kept == "nothing":
        assert not tree_leaves(kept)
    elif name.split()[0] not in ("fedsvi", "fedep"):  # some of their settings keep nothing
        assert tree_leaves(kept)
