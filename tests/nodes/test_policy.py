"""A node's policy: what it does not allow is refused, what waits for its owner is shown, what leaves is logged."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hierfl import Method, cli, methods
from hierfl.cli.officer_page import entries
from hierfl.core.trees import named_leaves
from hierfl.nodes import log
from hierfl.nodes.account import Ledger
from hierfl.nodes.messages import Answer, NodeFailed, from_bytes
from hierfl.nodes.node import introduce, introduced, node
from hierfl.nodes.policy import Forbidden, Policy, policy_at
from hierfl.nodes.run import fit_nodes
from hierfl.nodes.same_process import in_process
from hierfl.runs.preview import preview
from tests.nodes.one_process import Machines, lone, machines, rows
from tests.nodes.test_every_method import EACH
from tests.nodes.test_faults import plain
from tests.programs import regression


def told(around: Machines, rounds: int) -> list[list[str]]:
    """Run some rounds, and return which clients were left out of each, with the reasons."""
    found = fit_nodes(plain(), around.agreement, around.ask, rounds=rounds)
    return [[f"{one['client']}: {one['reason']}" for one in of] for of in found.history["left_out"]]


BAD: dict[str, str] = {
    "least_row = 3": "there is no key 'least_row': did you mean 'min_rows'",
    'methods = "fedavg"': "methods is 'fedavg': Expected `array",
    'discloses = ["sum"]': "Invalid enum value 'sum'",
    'may_leave = ["draw"]': "Invalid enum value 'draw'",
    "min_rows = 0": "min_rows is '0': Expected `int` >= 1",
    "seconds_a_request = 99999999999999999999": "seconds_a_request is .*: Expected `int` <= ",
    "rounds_a_day = true": "rounds_a_day is 'True': Expected `int",
    'approve = "never"': "approve is 'never': Invalid enum",
    'methods = ["two-stage"]': "methods holds .*: did you mean 'two_stage'",
    'transforms = ["scael"]': "transforms holds 'scael': did you mean 'scale'",
    'methods = ["fedavgg"]': "methods holds .*: did you mean 'fedavg'",
}
# tables, other types, numbers that are none, another encoding: none passes for a default
NONE = [
    *('[policy]\napprove = "ask"', "[limits]\nmin_rows = 50", "[approve]\nask = true"),
    *('approve = ["ask"]', 'approve = "ask"\napprove = "always"', 'Approve = "ask"'),
    *('approve = "ask "', "[methods]\nfedavg = true", "methods = {}", "min_rows = '50'"),
    *("min_rows = 50.0", "min_rows = []", "min_count = nan", "rounds_a_day = 0", "methods = ["),
    *("rounds_a_day = 1.5", "questions_a_day = false", "epsilon = 1.0", "polcy = 1"),
    *("epsilon = nan\ndelta = 1e-3", "epsilon = inf\ndelta = 1e-3", "min-rows = 50"),
    *('epsilon = "1"\ndelta = 1e-3', "epsilon = true\ndelta = 1e-3", "min_row = 50"),
    *("methods = " + "[" * 5000, "\ufeffmin_rows = 50", "min_rows = 50".encode("utf-16")),
]


@pytest.mark.parametrize("text", [*BAD, *NONE])
def test_a_wrong_policy_is_refused_with_the_nearest_key(text: Any, tmp_path: Path) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "policy.toml").write_bytes(content)
    with pytest.raises(ValueError, match=BAD.get(text, r"policy\.toml' cannot be read")):
        introduce(plain(), rows().select(["east"]), tmp_path)


def test_methods_of_hierfl_may_be_named_with_their_wrappers(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('methods = ["fedavg+BN", "two_stage with row noise"]')
    assert len(policy_at(tmp_path / "own.toml").methods or ()) == 2


def test_without_a_file_rounds_run_and_nothing_else_leaves(tmp_path: Path) -> None:
    policy = policy_at(None, tmp_path)
    policy.check(methods.two_stage(regression), 1)
    assert policy.may_leave == frozenset() and policy.approve == "always"


NEARLY = [
    "Policy.toml", "policy.TOML", "policy.toml.txt", "polcy.toml", "policy.toml ", ".policy.toml",
    "policy", "policy.toml~", "policy.toml.bak", "pol\u0456cy.toml", "node-policy.toml",
]  # fmt: skip


@pytest.mark.parametrize("name", NEARLY)
def test_a_policy_of_nearly_the_right_name_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("min_rows = 50")
    part = rows().select(["east"])
    with pytest.raises(ValueError, match=f"holds '{re.escape(name)}'.*rename it to 'policy.toml'"):
        introduce(plain(), part, tmp_path)
    with pytest.raises(ValueError, match=r"rename it to 'policy\.toml'"):
        lone(plain(), part, tmp_path)
    (tmp_path / name).unlink()
    made = lone(plain(), part, tmp_path)
    (tmp_path / name).write_text("min_rows = 50")  # during the run
    with pytest.raises(Forbidden, match="cannot be read: its owner"):
        introduced(made)


@pytest.mark.parametrize(
    "name", ["rows.csv", "policyholders.csv", "policies.parquet", "config.toml", "poetry.toml"]
)
def test_other_files_of_a_folder_are_no_policies(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    assert introduce(plain(), rows().select(["east"]), tmp_path)


def test_two_policies_are_refused_and_copies_beside_one_are_not(tmp_path: Path) -> None:
    part, own = rows().select(["east"]), tmp_path / "policy.toml"
    own.write_text('approve = "always"')
    for copy in ("policy.toml~", ".policy.toml.swp", "policy.toml.bak"):
        (tmp_path / copy).write_text("")
    introduce(plain(), part, tmp_path)
    (tmp_path / "policy.toml.txt").write_text('approve = "ask"')
    with pytest.raises(ValueError, match=r"holds 'policy\.toml\.txt'"):
        introduce(plain(), part, tmp_path)
    (tmp_path / "policy.toml.txt").unlink()
    named = tmp_path / "elsewhere.toml"
    named.write_text("min_rows = 1")
    with pytest.raises(
        ValueError, match=r"holds 'policy\.toml', .* from '.*elsewhere\.toml' alone"
    ):
        introduce(plain(), part, tmp_path, policy=named)
    named.unlink()
    named.symlink_to(own)  # the same file
    assert introduce(plain(), part, tmp_path, policy=named)


def test_a_policy_that_is_no_readable_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, own = rows().select(["east"]), tmp_path / "policy.toml"
    own.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"there is no policy '.*policy\.toml'"):
        introduce(plain(), part, tmp_path)
    own.unlink()
    own.mkdir()
    with pytest.raises(ValueError, match=r"cannot be read .*directory"):
        introduce(plain(), part, tmp_path)
    own.rmdir()
    own.write_text("")

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(ValueError, match=r"cannot be read .Permission denied"):
        introduce(plain(), part, tmp_path)


def test_a_policy_that_was_there_must_stay(tmp_path: Path) -> None:
    """Also over a restart: each message may be answered by a new process."""
    part, own = rows().select(["east"]), tmp_path / "node" / "policy.toml"
    own.parent.mkdir()
    own.write_text("min_rows = 2")
    made = lone(plain(), part, own.parent)
    own.unlink()
    with pytest.raises(Forbidden, match="cannot be read: its owner"):
        introduced(made)
    with pytest.raises(ValueError, match=r"put that file back, or remove .*has-policy'"):
        introduce(plain(), part, own.parent)
    (own.parent / "has-policy").unlink()
    assert introduce(plain(), part, own.parent)
    named = tmp_path / "named.toml"
    named.write_text("min_rows = 2")
    introduce(plain(), part, tmp_path / "other", policy=named)
    with pytest.raises(ValueError, match=r"has been under '.*named\.toml'"):  # no more named
        introduce(plain(), part, tmp_path / "other")
    with pytest.raises(ValueError, match=r"there is no policy '.*fresh/policy\.toml'"):
        introduce(plain(), part, tmp_path / "fresh", policy=tmp_path / "fresh" / "policy.toml")


def test_a_rehearsal_refuses_a_policy_that_no_node_reads(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("min_rows = 50")
    with pytest.raises(ValueError, match="no node reads the policy"):
        in_process(rows(), tmp_path)
    (tmp_path / "policy.toml").unlink()
    (tmp_path / "East").mkdir()
    in_process(rows(), tmp_path)
    (tmp_path / "East" / "policy.toml").write_text("min_rows = 50")
    with pytest.raises(ValueError, match=r"no node reads .*East'.*east/policy\.toml' alone"):
        in_process(rows(), tmp_path)


WRONG: dict[str, tuple[str, Callable[[], Method], str]] = {
    "method": ('methods = ["fedsvi", "ditto"]', plain, "'fedavg': .*'ditto', 'fedsvi'"),
    "discloses": ('discloses = ["sums"]', lambda: methods.two_stage(regression), "discloses summ"),
    "rows": ("min_rows = 8", plain, "asks for 8 rows or more, and the client has fewer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_policy_does_not_allow_is_refused_before_and_during_a_run(
    name: str, tmp_path: Path
) -> None:
    text, method, why = WRONG[name]
    part, folder = rows().select(["east"]), tmp_path / "east"
    folder.mkdir()
    (folder / "policy.toml").write_text(text)
    with pytest.raises(Forbidden, match=why):
        introduce(method(), part, folder)
    with pytest.raises(Forbidden, match=why):
        lone(method(), part, folder)
    (folder / "policy.toml").write_text("")
    made = lone(method(), part, folder)
    (folder / "policy.toml").write_text(text)  # the owner changes it during the run
    with pytest.raises(Forbidden, match=why):
        introduced(made)
    refused = [one for one in entries(folder) if one["what"] == "refusal"]
    assert len(refused) == 3 and len({one["text"] for one in refused}) == 1


def test_a_node_goes_through_as_many_rounds_a_day_as_it_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = machines(plain(), rows(), tmp_path)
    north = around.nodes["north"]
    north.policy.write_text("rounds_a_day = 2")
    left_out = told(around, 4)
    assert [len(of) for of in left_out] == [0, 0, 1, 1]
    assert left_out[2][0].startswith("north: the node's policy allows 2 rounds a day")
    again = fit_nodes(plain(), around.agreement, around.ask, rounds=2)  # the same rounds
    assert again.history["clients"].tolist() == [4, 4]
    new = "round", north.run, "another request", Policy(rounds_a_day=2), None
    with pytest.raises(Forbidden, match="been through 2"):
        Ledger.at(north.folder).check_limits(*new)
    in_two_days = log.now(timedelta(days=-2))
    monkeypatch.setattr(log, "now", lambda since=None: in_two_days)
    Ledger.at(north.folder).check_limits(*new)


def test_a_run_waits_for_approval_and_runs_after_it(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir(parents=True)
    (tmp_path / "1" / "policy.toml").write_text('approve = "ask"')
    around = machines(plain(), rows(), tmp_path)
    north = around.nodes["north"]
    with pytest.raises(Forbidden, match=r"waits for the approval .*previews.*hierfl node approve"):
        introduced(north)
    ((reason,),) = told(around, 1)
    assert f"hierfl node approve FOLDER {north.run}" in reason and str(tmp_path) not in reason
    preview = north.folder / "previews" / f"{north.run}.txt"
    text = preview.read_text()
    for said in ("Client 'north' with 5 rows, of 4", "Method fedavg", "sums over clients only"):
        assert said in text
    done = CliRunner().invoke(cli.app, ["node", "approve", str(north.folder), north.run])
    assert done.exit_code == 0 and str(preview) in done.output.replace("\n", "")
    assert told(around, 1) == [[]]
    preview.write_text(text + "another model")  # what was approved is what stands there
    assert "waits for the approval" in told(around, 1)[0][0]
    node(plain(), rows().select(["north"]), around.agreement, north.folder)  # a restart
    assert told(around, 1) == [[]]


def test_only_a_run_with_a_preview_can_be_approved(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").touch()
    for run in ("abc", "../abc"):
        done = CliRunner().invoke(cli.app, ["node", "approve", str(tmp_path), run])
        assert done.exit_code == 2 and "no run has asked for approval" in " ".join(
            done.output.split()
        )


def test_a_preview_says_what_crosses_and_what_the_model_is(tmp_path: Path) -> None:
    method = methods.fedsvi(regression)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "policy.toml").write_text('approve = "ask"')
    around = machines(method, rows(), tmp_path)
    east = around.nodes["east"]
    lines = (east.folder / "previews" / f"{east.run}.txt").read_text().splitlines()
    for line in (
        "  loc ~ Normal(loc 0, scale 1)  (global; shape (2,))",
        "  spread ~ HalfNormal(scale 1)  (global; shape ())",
    ):
        assert line in lines
    (slope,) = [line for line in lines if line.startswith("  slope ~")]
    assert "of each client; given loc, spread, lift" in slope
    (y,) = [line for line in lines if line.startswith("  y ~ ")]
    assert "observed; of each client; plate data; given slope" in y
    assert "Fields of the rows that model and guide read: height, x, y" in lines
    assert "def regression(batch: ClientBatch) -> None:" in lines
    # the tensors that it names are those that leave
    (east.folder / "policy.toml").write_text("")
    fit_nodes(method, around.agreement, around.ask, rounds=1)
    update = from_bytes(dict(around.sent)["east"], most=1 << 20).tree
    at = next(k for k, line in enumerate(lines) if line.startswith("What this node sends"))
    shown = [line.split("  ")[1] for line in lines[at + 1 : at + 1 + len(named_leaves(update))]]
    assert len(shown) == len(set(shown)) == len(named_leaves(update))
    assert lines[at + 1 + len(shown)].startswith("What the server sends")


@pytest.mark.slow("pvi")
@pytest.mark.parametrize("name", ["fedmap", "fedfomo", "pvi"])
def test_every_kind_of_method_has_a_preview(name: str, tmp_path: Path) -> None:
    part = rows().select(["west"])
    west = machines(EACH[name](), part, tmp_path, policy="min_count = 1").nodes["west"]
    found = preview(west.run, west.method, west.federation)
    cannot = name == "fedmap"  # Pyro's inspection does not run its params
    assert ("cannot be run alone" in found) == cannot
    assert "Source of the model" in found and "  ['" in found


def test_a_preview_changes_no_number_of_the_run(tmp_path: Path) -> None:
    found = []
    for policy in ('approve = "always"', 'approve = "ask"'):
        around = machines(
            methods.fedsvi(regression), rows(), tmp_path / policy[11:13], policy=policy
        )
        for each in around.nodes.values() if "ask" in policy else ():
            CliRunner().invoke(cli.app, ["node", "approve", str(each.folder), each.run])
        method = methods.fedsvi(regression)
        found.append(fit_nodes(method, around.agreement, around.ask, rounds=2))
    one, two = (named_leaves(fit.message) for fit in found)
    assert all(one[name].equal(two[name]) for name in one)


def test_everything_that_leaves_is_in_the_log_first(tmp_path: Path) -> None:
    part = rows().select(["east"])
    sent = [("introduction", introduce(plain(), part, tmp_path / "0"))]
    around = machines(plain(), rows(), tmp_path)
    east = around.nodes["east"]
    sent.append(("start", json.dumps(introduced(east)).encode()))

    def ask(contents: Mapping[str, bytes]) -> Iterable[Answer]:
        for one in around.ask(contents):
            asked = from_bytes(contents[one.client], most=1 << 20).about
            if one.client == "east" and one.content is not None and "round" in asked:
                sent.append(("update", one.content))
            yield one

    over = fit_nodes(plain(), around.agreement, ask, rounds=2)
    east.policy.write_text('may_leave = ["scores"]')
    around.sent.clear()
    over.scores(site="y")
    over.predict(site="y")
    for what, (_, content) in zip(
        ("scores", "no predictions"), [s for s in around.sent if s[0] == "east"], strict=True
    ):
        sent.append((what, content))
    logged = entries(east.folder)
    assert [one["what"] for one in logged] == [what for what, _ in sent]
    for one, (_, content) in zip(logged, sent, strict=True):
        assert one["sha256"] == hashlib.sha256(content).hexdigest() and one["bytes"] == len(content)
    update: Any = logged[2]
    assert (update["run"], update["round"]) == (east.run, 0)
    leaves = named_leaves(from_bytes(sent[2][1], most=1 << 20).tree)
    assert len(update["tensors"]) == len(leaves)
    shapes = sorted(kind for kind in update["tensors"].values())
    assert shapes == sorted([str(v.dtype)[6:], *v.shape] for v in leaves.values())
    assert (east.folder / log.FILE).stat().st_mode & 0o077 == 0
    shown = CliRunner().invoke(cli.app, ["node", "log", str(east.folder)])
    assert shown.exit_code == 0 and shown.output.count("update") == 2
    for other, why in ((tmp_path, "not a node's folder"), (tmp_path / "typo", "does not exist")):
        shown = CliRunner().invoke(cli.app, ["node", "log", str(other)])
        words = " ".join(shown.output.replace("│", " ").split())
        assert shown.exit_code == 2 and why in words


def test_a_log_with_a_torn_line_goes_on(tmp_path: Path) -> None:
    log.left(tmp_path, b"one", "introduction")
    with open(tmp_path / log.FILE, "a") as file:
        file.write('{"time": "2026-')  # killed here
    log.left(tmp_path, b"two", "introduction")
    assert [one["text"] for one in entries(tmp_path)] == ["one", "two"]


def test_nothing_leaves_where_the_log_cannot_be_written(tmp_path: Path) -> None:
    around = machines(plain(), rows(), tmp_path)
    north = around.nodes["north"]
    (north.folder / log.FILE).mkdir()
    with pytest.raises(NodeFailed, match="cannot be written"):
        introduced(north)
