"""Checkpoints: complete or absent, resumed bit for bit, refused for another run, private data apart."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hierfl
from hierfl import Fit, Method, guides
from hierfl.core.trees import tree_leaves
from hierfl.optimizers import Adam, TorchOptimizer
from hierfl.runs import checkpoint as state
from tests.methods import cases
from tests.programs import federation, fit, logistic, regression, same
from tests.runs.fits import two_rounds

# states of optimizers, of chains, of mail, and of a wrapper
METHODS: dict[str, Callable[[], Method]] = {
    "structured": lambda: hierfl.methods.fedsvi(regression, batch_size=2, local_steps=1),
    "conditional": lambda: hierfl.methods.fedsvi(
        regression, guides.conditional, optimizer=TorchOptimizer(torch.optim.NAdam, {"lr": 0.05})
    ),
    **{name: cases.METHODS[name] for name in ("fedfomo", "pfedme", "fedpop", "quantized")},
}


@pytest.mark.slow("conditional-2", "structured-2", "structured-None")
@pytest.mark.parametrize(
    ("name", "cohort"), [*((name, 2) for name in METHODS), ("structured", None)]
)
def test_a_resumed_run_is_the_whole_run(name: str, cohort: int | None, tmp_path: Path) -> None:
    method, data = METHODS[name](), federation((5, 3, 7, 1, 2))
    run: dict[str, Any] = {"rounds": 5, "seed": 3, "cohort": cohort}
    kept: dict[str, Any] = {"checkpoint": tmp_path, "checkpoint_every": 2}
    whole = fit(method, data, **run)
    assert run_until(2, method, data, **run, **kept) == 2
    same(whole, fit(method, data, **run, **kept, resume=True))
    assert [p.name for p in state.checkpoints(tmp_path)] == ["round-00000004", "round-00000005"]
    if name == "structured":  # a run that has ended resumes to itself
        same(whole, fit(method, data, **run, checkpoint=tmp_path, resume=True))


def run_until(last: int, method: Method, data: hierfl.ClientData, **options: Any) -> int:
    """Run until the process dies in the round after `last`; return the round of the newest checkpoint."""

    class Cut(Exception):
        pass

    server = method.server

    def dying(program: hierfl.Program) -> hierfl.Server:
        made = server(program)

        def update(held: Any, means: Any, clock: hierfl.Clock) -> Any:
            if clock.round == last:
                raise Cut
            return made.update(held, means, clock)

        return replace(made, update=update)

    cut = replace(method, server=dying)
    object.__setattr__(cut, "__recipe__", method.__recipe__)  # type: ignore[attr-defined]
    with pytest.raises(Cut):
        fit(cut, data, **options)
    newest = state.checkpoints(options["checkpoint"])[-1]
    return state.read_record(newest).round


def test_early_stopping_resumes_where_it_was(tmp_path: Path) -> None:
    train, test = federation((8, 8, 8)).split(0.6, seed=0)
    options: dict[str, Any] = {"rounds": 60, "validation": test, "eval_every": 2, "patience": 3}
    method = hierfl.methods.fedsvi(regression, optimizer=Adam(0.5), local_optimizer=Adam(0.5))
    stopped = fit(method, train, checkpoint=tmp_path, checkpoint_every=1, **options)
    assert stopped.progress.round < 60, "otherwise this test would test nothing"
    same(
        stopped, fit(method, train, checkpoint=tmp_path, checkpoint_every=1, resume=True, **options)
    )
    scores = stopped.history["validation_log_score"].dropna().tolist()
    assert max(scores) == scores[-4], "the last three scores were no better"


def test_loaded_tensors_lie_as_new_ones_do(tmp_path: Path) -> None:
    """A file's own bytes are not aligned, and float32 products of such tensors round otherwise."""
    two_rounds().save(tmp_path)
    found = hierfl.load(tmp_path).progress
    for leaf in (*tree_leaves(found.server), *tree_leaves(found.table)):
        assert leaf.data_ptr() % 64 == 0


def test_nothing_on_disk_is_a_pickle(tmp_path: Path) -> None:
    fit(METHODS["pfedme"](), federation(), rounds=2, checkpoint=tmp_path).save(tmp_path)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".json", ".safetensors"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            load_file(path)


def test_global_and_local_params_are_in_separate_files(tmp_path: Path) -> None:
    """The global file holds no local param and no tensor with one row per client.

    Its shapes do not depend on N.
    """
    sizes = []
    for n in (2, 5):
        fitted = fit(
            METHODS["structured"](), federation((4,) * n), rounds=1, checkpoint=tmp_path / str(n)
        )
        newest = state.checkpoints(tmp_path / str(n))[-1]
        shared, local = (
            load_file(newest / "global.safetensors"),
            load_file(newest / "local.safetensors"),
        )
        names = {spec.name for spec in fitted.program.params if spec.is_local}
        assert names
        assert not [key for key in shared if any(name in key for name in names)]
        assert all(any(name in key for key in local) for name in names)
        assert all(value.shape[0] == n for value in local.values())
        sizes.append({key: value.shape for key, value in shared.items()})
        record = json.loads((newest / "state.json").read_text())
        assert not any(
            isinstance(v, list | dict) for row in record["history"] for v in row.values()
        )
    assert sizes[0] == sizes[1]


@pytest.fixture(scope="module")
def six_rounds() -> Fit:
    return fit(METHODS["structured"](), federation(), rounds=6)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six rounds that died after the fourth."""
    folder = tmp_path_factory.mktemp("stopped")
    method = METHODS["structured"]()
    run_until(4, method, federation(), rounds=6, checkpoint=folder, checkpoint_every=2)
    return folder


def damaged(folder: Path, file: str, change: Callable[[bytes], bytes]) -> Path:
    path = state.checkpoints(folder)[-1] / file
    path.write_bytes(change(path.read_bytes()))
    return path


def flipped(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


def later(content: bytes) -> bytes:
    return content.replace(b'"round": 4', b'"round": 5', 1)


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "truncated": ("global.safetensors", lambda b: b[: len(b) // 2], "global.safetensors is truncated or changed"),
    "empty": ("local.safetensors", lambda b: b"", "local.safetensors is truncated or changed"),
    "a bit": ("global.safetensors", flipped, "global.safetensors is truncated or changed"),
    "a bit of a row": ("local.safetensors", flipped, "local.safetensors is truncated or changed"),
    "truncated record": ("state.json", lambda b: b[:40], r"state\.json cannot be read"),
    "no JSON": ("state.json", lambda b: b"\x80\x04K\x01.", r"state\.json cannot be read"),
    "foreign JSON": ("state.json", lambda b: b'{"format": "other"}', r"state\.json does not belong to a hierfl run"),
    "a list": ("state.json", lambda b: b"[1, 2]", r"state\.json does not belong to a hierfl run"),
    "a record without hashes": ("state.json", lambda b: b'{"format": "hierfl-run", "version": 4}', "state.json"),
    "another round": ("state.json", later, "state.json"),
    "another version": (
        "state.json", lambda b: b.replace(b'"version": 4', b'"version": 1'), "format 1; this hierfl reads 4"
    ),
}  # fmt: skip


@pytest.mark.slow("truncated")
@pytest.mark.parametrize("what", DAMAGE)
def test_damage_falls_back_one_checkpoint(
    what: str, six_rounds: Fit, stopped: Path, tmp_path: Path
) -> None:
    file, change, message = DAMAGE[what]
    method, data = METHODS["structured"](), federation()
    copytree(stopped, tmp_path, dirs_exist_ok=True)
    path = damaged(tmp_path, file, change)
    with pytest.warns(
        UserWarning, match=f"skipped damaged checkpoints.*round-00000004: .*{message}"
    ):
        same(six_rounds, fit(method, data, rounds=6, checkpoint=tmp_path, resume=True))
    assert path.exists()


def test_without_an_undamaged_checkpoint_it_is_an_error(stopped: Path, tmp_path: Path) -> None:
    method, data = METHODS["structured"](), federation()
    copytree(stopped, tmp_path, dirs_exist_ok=True)
    for checkpoint in state.checkpoints(tmp_path):
        (checkpoint / "local.safetensors").unlink()
    with pytest.raises(
        hierfl.CheckpointError,
        match=r"no undamaged checkpoint in .*local.safetensors is missing.*start again",
    ):
        fit(method, data, rounds=6, checkpoint=tmp_path, resume=True)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, r"differs in seed \(seed: 0 there, 1 here\)"),
    "rounds": ({"rounds": 9}, r"differs in rounds \(rounds: 6 there, 9 here\)"),
    "cohort": ({"cohort": 2}, r"differs in cohort \(cohort: 4 there, 2 here\)"),
    "method": (
        {"method": lambda: hierfl.methods.fedsvi(regression, batch_size=3, local_steps=1)}, "differs in method"
    ),
    "a method with other states": (
        {"method": lambda: hierfl.methods.pvi(regression)},
        r"differs in method \(hierfl\.methods\.fedsvi there, hierfl\.methods\.pvi here\)"
    ),
    "a guide with other states": (
        {"method": lambda: METHODS["conditional"]()},
        r"differs in method \(guide: hierfl\.guides\.structured there, hierfl\.guides\.conditional here"
    ),
    "a model with other states": (
        {"method": lambda: hierfl.methods.fedsvi(logistic, batch_size=2, local_steps=1)},
        r"differs in method \(model: "
    ),
    "optimizer": (
        {"method": lambda: hierfl.methods.fedsvi(regression, batch_size=2, local_steps=1, optimizer=Adam(0.5))},
        "differs in method"
    ),
    "clients": ({"data": lambda: federation().select(["south", "north", "west", "east"])}, "differs in clients"),
    "rows": ({"data": lambda: federation((4, 4, 7, 1))}, "differs in rows"),
    "fields": ({"data": lambda: federation().without("ill")}, "differs in fields"),
    "values": ({"data": lambda: federation(seed=1)}, "differs in rows"),
}  # fmt: skip


@pytest.mark.slow("a method with other states")
@pytest.mark.parametrize("what", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(what: str, stopped: Path, tmp_path: Path) -> None:
    options, message = OTHERS[what]
    copytree(stopped, tmp_path, dirs_exist_ok=True)
    made = {k: v() if callable(v) else v for k, v in options.items()}
    method, data = made.pop("method", METHODS["structured"]()), made.pop("data", federation())
    with pytest.raises(
        hierfl.CheckpointError, match=f"belongs to another run: it {message}.*name another folder"
    ):
        fit(method, data, checkpoint=tmp_path, resume=True, **{"rounds": 6, **made})


def test_a_new_run_in_the_folder_of_an_old_one_is_refused(tmp_path: Path) -> None:
    """A forgotten resume=True must not overwrite the result of days of rounds."""
    data = federation()
    old = fit(METHODS["structured"](), data, rounds=2, checkpoint=tmp_path, checkpoint_every=1)
    with pytest.raises(ValueError, match="already holds a run: continue it with resume=True"):
        fit(METHODS["conditional"](), data, rounds=1, checkpoint=tmp_path, checkpoint_every=1)
    again = fit(METHODS["structured"](), data, rounds=2, checkpoint=tmp_path, resume=True)
    same(old, again)
