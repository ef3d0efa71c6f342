"""`load`, which reads a fit from disk, and makes its method again: nothing in a record is trusted."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hierfl.core.arguments import expect_path, shown, spelled
from hierfl.core.process import Limit, one_at_a_time
from hierfl.data.absent import FILLS, RowsNotSaved, stand_in
from hierfl.data.batch import expect_client_data
from hierfl.data.clients import ClientData
from hierfl.engine.client_store import CheckpointError
from hierfl.engine.federation import Federation, Settings, federate
from hierfl.engine.rounds import begin
from hierfl.method import Method
from hierfl.program.public_names import HAND_IN, CannotRemake
from hierfl.program.recipes import describe, remake
from hierfl.program.sites import Family, Guide, Model
from hierfl.runs import checkpoint as state
from hierfl.runs import saved
from hierfl.runs.records import about_data
from hierfl.runs.result import Fit

if TYPE_CHECKING:
    from hierfl.formulas.formula import Frames

T = TypeVar("T")

# Options whose number takes neither memory nor time before the next round.
FREE = frozenset("batch_size global_steps inner_steps local_steps".split())
FREE |= frozenset("max_global_size personal_steps steps target_ess".split())
# Up to here the numbers of a recipe cannot add up to memory that matters: about a gigabyte.
SMALL = 10**8
LARGEST = 1 << 31  # bytes of one tensor while a program with larger numbers is read
OPERATIONS = 300_000


def remade(who: Mapping[str, Any], handed: Mapping[str, Any]) -> Method:
    """Make a run's method again from its record; `handed` holds the user's own model or guide."""

    def made() -> Method:
        method = remake(who["method"], handed=handed)
        if not isinstance(method, Method):
            raise CannotRemake(f"the record holds no method, but {shown(method)}: {HAND_IN}")
        return method

    return guarded(who, made)


def guarded(who: Mapping[str, Any], work: Callable[[], T]) -> T:
    """Do what uses a method of a record, which may call for anything of hierfl."""
    try:
        with _limits(who):
            return work()
    except (CannotRemake, CheckpointError, RowsNotSaved):
        raise
    except Exception as error:
        what = f"the method of the record does not run on these rows ({str(error)[:500]})"
        raise CannotRemake(f"{what}: {HAND_IN}") from error


def _limits(who: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Return limits on memory, where the sizes in a recipe are so large that they are needed."""
    widest = max((math.prod(_sizes(field)) for field in who["fields"].values()), default=1)
    if math.prod(_sizes(who["method"])) * widest <= SMALL:
        return nullcontext()
    return Limit(LARGEST, OPERATIONS)


def _sizes(description: Any) -> Iterator[int]:
    """Yield the whole numbers of a recipe that may be sizes; those of a guide family always may."""
    if isinstance(description, list):
        for value in description:
            yield from _sizes(value)
    elif isinstance(description, dict):
        options = description.get("with")
        options_of = options if isinstance(options, dict) else description
        free = FREE if "made_by" in description else frozenset({"tensor", "code"})
        for key, value in options_of.items():
            if key not in free:
                yield from _sizes(value)
    elif isinstance(description, int) and not isinstance(description, bool) and description > 1:
        yield description


@spelled
@one_at_a_time
def load(
    folder: str | Path,
    *,
    method: Method | None = None,
    model: Model | None = None,
    guide: Guide | Family | None = None,
    data: "ClientData | Frames | None" = None,
) -> Fit:
    """Read a fit that `Fit.save`, or a checkpoint of `fit`, has written.

    No code is stored, and no code that the folder names is run. The method is rebuilt from its
    record: hierfl's own functions by their public names, your own model and guide if this program
    has marked them with `@hierfl.model` and `@hierfl.guide`. Pass anything else.

    What is marked or passed is compared with the record: settings, the code and constants of
    functions, their closures, defaults and the globals they read, and the layers, shapes and fixed
    values of modules, but not the starting values of learned weights. Code is compared only under
    the Python version that wrote the record; under another version, a warning says so.

    Args:
        folder: the folder of the fit or the run.
        method: the method that was fitted. None: it is rebuilt.
        model: the model of the method, if it is neither hierfl's nor marked.
        guide: the same.
        data: the clients' training rows; for a formula also frames. They are compared with a salted
            hash of the fitted rows. None: those saved with the fit. If none were saved, the fit
            answers what needs no rows (global draws, new clients, and fitted clients if the guide
            reads no rows), and raises `RowsNotSaved` for everything else.

    Raises:
        TypeError: `folder` is not a path.
        CheckpointError: the folder holds no undamaged checkpoint, or that of another method or
            other clients; the message names what differs.
        CannotRemake: the method cannot be rebuilt, or the model or guide is another one.
        RowsNotSaved: the rows were not saved, and the program cannot be read without them.
        ValueError: `method` is given together with `model` or `guide`.
    """
    handed = {k: v for k, v in (("model", model), ("guide", guide)) if v is not None}
    if method is not None and handed:
        raise ValueError("a method already has its model and guide: leave model= and guide= out")
    root = expect_path(folder, "folder", "run")
    checkpoints = state.checkpoints(root)
    if not checkpoints:
        raise state.CheckpointError(f"'{folder}' holds no hierfl run")
    newest, record = saved.newest_record(checkpoints)
    who = record.about
    same = {"method": who["method"] if method is None else describe(method)}
    state.check_same(newest, who, same)  # before anything runs on the rows
    made = remade(who, handed) if method is None else method
    if data is None:
        there = saved.read(newest, record)
    else:
        there = saved.SavedData(_rows_in(made, data), None)
    if there.data is not None:
        same |= about_data(there.data)
    state.check_same(newest, who, same)

    def set_up() -> Federation:
        settings = Settings(engine=who.get("engine", "vectorized"))
        federated = partial(federate, made, seed=who["seed"], settings=settings)
        if there.data is None:
            return _without_rows(there, str(folder), federated)
        return federated(there.data)

    federation = replace(guarded(who, set_up) if method is None else set_up(), cohort=who["cohort"])
    grows = federation.server.grows
    progress = state.load(root, begin(federation), same | about_data(federation.data), grows=grows)
    return Fit(made, federation, progress, who["rounds"])


def _rows_in(method: Method, data: Any) -> ClientData:
    """Return the rows that a user hands in, of a formula perhaps as frames."""
    if not isinstance(data, ClientData):
        from hierfl.formulas.formula import rows_of  # it imports pandas

        data = rows_of(method.model, data)
    return expect_client_data(data, "data")


def _without_rows(
    saved_data: saved.SavedData, folder: str, federated: Callable[[ClientData], Federation]
) -> Federation:
    schema = saved_data.schema
    if schema is None:
        raise RowsNotSaved(f"'{folder}' was saved without the clients' rows: {saved.HAND_IN}")
    dtype, starts = str(torch.get_default_dtype()), set[str]()
    if schema["dtype"] != dtype:
        what = f"'{folder}' holds a fit in {schema['dtype']}, and torch's default is {dtype}"
        fix = f"call torch.set_default_dtype({schema['dtype']}) first"
        raise state.CheckpointError(f"{what}: {fix}")
    for fills in FILLS:
        data = saved_data.without_rows(fills)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the fit itself, said when it was made
                federation = federated(stand_in(data, 0))
        except ValueError:  # labels outside their support, for example
            continue
        unfilled = replace(federation, data=data)
        starts.add(saved.start_of(federation))
        if schema["start"] in starts:
            return unfilled
        sites = saved.sites_of(federation.program)
    if len(starts) > 1:  # by a client field, which is not there: the saved state has what it gave
        _check_sites(schema["sites"], sites, folder)
        return unfilled
    what = f"'{folder}' was saved without the clients' rows, and its program cannot be read without them"
    raise RowsNotSaved(f"{what}: {saved.HAND_IN}")


def _check_sites(saved_sites: Mapping[str, str], here: Mapping[str, str], folder: str) -> None:
    """Refuse a program whose sites or priors are other than those of the fit."""
    for name in {**saved_sites, **here}:
        there, now = saved_sites.get(name, "absent"), here.get(name, "absent")
        if there != now:
            what = f"it differs in site '{name}' ({there} there, {now} here)"
            raise state.CheckpointError(f"'{folder}' holds a fit of another program: {what}")
