"""Reading a user's program from eager, validated traces; an error names a mistake and its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import pyro
from pyro import poutine
from pyro.poutine.messenger import Messenger

from hierfl.core import noise
from hierfl.core.arguments import spelled
from hierfl.core.process import one_at_a_time
from hierfl.data.batch import ClientBatch, expect_client_data
from hierfl.data.clients import ClientData
from hierfl.program.check_dependence import (
    check_boundary,
    check_padding,
    check_pure,
    no_global_draws,
)
from hierfl.program.check_program import (
    Plates,
    check_start,
    check_steps,
    faults_of_cover,
    faults_of_kinds,
    faults_of_plates,
)
from hierfl.program.compared import check_slopes
from hierfl.program.failures import root_of, why_it_fails
from hierfl.program.handlers import NoKeyedDraw, Substitute, untouched_store
from hierfl.program.joint_sites import joint_sites
from hierfl.program.labels import (
    Recorded,
    checked_labels,
    codes_of,
    holes,
    label_fields,
    of_codes,
    prototype_of,
)
from hierfl.program.missing import check_missing, filled, not_dealt_with
from hierfl.program.program import Program, ProgramError, Reads, refuse_first
from hierfl.program.read_traces import (
    check_sizes,
    closed_of,
    derived_of,
    faults_of_rows,
    is_keyed,
    latents_of,
    likelihood_factors,
    observed_outside,
    params_of,
)
from hierfl.program.sites import Family, Guide, Model
from hierfl.program.supports import (
    Enumerable,
    OfRows,
    PriorCenters,
    check_density,
    refuse_in_sample,
)
from hierfl.program.traces import Near, is_deterministic, samples
from hierfl.program.wrapped import (
    has_bounds,
    has_mapped_sites,
    mixes_dtypes,
    moving_supports,
    sites_to_float,
    with_common_site,
    with_defined_start,
    with_factors,
    with_filled_labels,
    with_fixed_supports,
    with_float_labels,
    with_one_dtype,
    with_plain_sites,
)

if TYPE_CHECKING:
    from hierfl.program.row_runs import Structure


@spelled
@one_at_a_time
def read(
    model: Model, guide: Guide | Family, data: ClientData, *, seed: int = 0, learn: bool = True
) -> Program:
    """Read a program from eager, validated traces on one and on two of the clients.

    Args:
        model: the generative program.
        guide: a guide function, or a family to make one of.
        data: the federation it will run on.
        seed: of the run: of starting values that the program draws for its params, and of what its
            method draws.
        learn: whether gradients will be taken as the clients' steps take them; False: the program
            is only read.

    Raises:
        TypeError: `data` is not a `ClientData`.
        ValueError: NaN or infinity in a field that the model does not handle, or labels outside
            the support of their site; the message names client and field.
        ProgramError: the program itself is wrong; the message names the site and the fix.
    """
    if not isinstance(guide, Family):
        from hierfl.program.pyro_guides import family_of  # few guides are Pyro's

        guide = family_of(guide)
    refuse_first(faults_of_kinds(model, guide))
    if not isinstance(guide, Family) and isinstance(data, ClientData):
        from hierfl.program.encoded_rows import with_encoded_rows  # few guides have sites of rows

        model, guide = with_encoded_rows(
            model, guide, prototype_of(data, data.by_name[:1].tolist())
        )
    return read_model(model, data, seed=seed).under(guide, learn=learn)


@one_at_a_time
def read_model(model: Model, data: ClientData, *, seed: int = 0) -> ModelRead:
    """Read a model before it has a guide; the arguments and errors are those of `read`."""
    expect_client_data(data, "data")
    missing = bool(holes(data))
    try:
        return _read_model(model, data, seed, missing)
    except ValueError as error:
        if not missing:
            raise
        _explain(error, data, lambda other: _read_model(model, other, seed, missing=False))


def _explain(
    error: ValueError, data: ClientData, again: Callable[[ClientData], object]
) -> NoReturn:
    """Raise the error of a program on data with missing values, which may be the cause."""
    try:
        again(filled(data))
    except ProgramError:
        raise error from None  # something else is wrong
    except ValueError:
        pass  # a filled label, outside its support
    raise not_dealt_with(data) from error


@dataclass(frozen=True, eq=False)
class ModelRead:
    """A model, read and checked: its program lacks a guide; `traces` are of one client and of two."""

    program: Program
    data: ClientData
    missing: bool
    traces: tuple[Any, Any]

    @one_at_a_time
    def under(self, guide: Guide | Family, *, learn: bool = True) -> Program:
        """Return the program of the model and a guide; arguments and errors are those of `read`."""
        try:
            program = self._under(guide, learn)
        except ValueError as error:
            if not self.missing:
                raise
            _explain(
                error,
                self.data,
                lambda other: _read_model(
                    self.program.model, other, self.program.seed, missing=False
                )._under(guide, learn),
            )
        if self.missing:
            check_missing(program, self.data)
        return program

    def _under(self, guide: Any, learn: bool) -> Program:
        (single, pair), base = self.traces, self.program
        model, batch, seed = base.model, base.prototype, base.seed
        build = getattr(guide, "build", None)
        if getattr(build, "has_global_sites", False) and not base.latents.global_block.size:
            joined = _read_model(with_common_site(model), self.data, seed, self.missing)
            joined = replace(joined, program=replace(joined.program, row_sites=base.row_sites))
            return joined._under(guide, learn)
        whole = getattr(build, "reads_all_rows", False)
        # Newton steps are in the units of the priors, gradient steps in the sites' own
        latents = base.latents if whole else base.latents.in_own_units()
        with pyro.validation_enabled(True):
            built = guide
            if isinstance(guide, Family):
                built = guide.build(model, latents, **guide.options)
            two = prototype_of(self.data, self.data.by_name[[0, -1]].tolist())
            guided, reads = _trace(built, batch, "guide", seed, Substitute({}, batch))
            guided_pair, _ = _trace(built, two, "guide", seed, Substitute({}, two))
            refuse_first(faults_of_cover(latents, guided))
            check_boundary(built, batch, "guide", Substitute({}, batch))
            program = replace(
                base,
                guide=built,
                latents=latents,
                # before the guide runs again: it refuses one that cannot be drawn
                keyed=is_keyed(guided),
                params=params_of([single, guided], [pair, guided_pair]),
                closed=closed_of(single, guided),
                reads=Reads(base.reads.model, reads),
                reads_all_rows=whole,
            )
            check_start(program, batch)
            check_pure(program, batch)  # first: its own noise would look as if padding mattered
            check_padding(program, self.data)
        return check_steps(program, batch) if learn else program


def _read_model(model: Model, data: ClientData, seed: int, missing: bool) -> ModelRead:
    # by name: what a method begins with must not depend on the order in which clients are given
    ends = data.by_name[[0, -1]].tolist()
    single_batch, two = prototype_of(data, ends[:1]), prototype_of(data, ends)
    row_sites, model = None, with_filled_labels(model) if missing else model
    model = with_one_dtype(model) if mixes_dtypes(model, two) else model
    model = with_defined_start(model, two)
    with pyro.validation_enabled(True):
        # two clients first: only they show a local site that is read outside its plate
        try:
            pair, _ = _trace(model, two, "model", seed, PriorCenters())
        except (Enumerable, OfRows):
            with _explained("model", two, {}):
                model, row_sites = _without_hidden_sites(model, data, two, seed)
            pair, _ = _trace(model, two, "model", seed, PriorCenters())
        single, reads = _trace(model, single_batch, "model", seed, PriorCenters())
        if codes := [name for name in sorted(codes_of(data)) if name in reads]:
            for batch in of_codes(data, codes):
                other, _ = _trace(model, batch, "model", seed, PriorCenters())
                refuse_first(faults_of_rows(single, other))
        with untouched_store():
            labels, computed = label_fields(model, pair, two)
        floats, is_mapped = sites_to_float(pair), has_mapped_sites(pair)
        if floats or is_mapped or computed:
            model = with_float_labels(model, floats) if floats else model
            model = with_factors(model, computed) if computed else model
            model = with_plain_sites(model) if is_mapped else model
            pair, _ = _trace(model, two, "model", seed, PriorCenters())
            single, reads = _trace(model, single_batch, "model", seed, PriorCenters())
        if has_bounds(pair):
            other, _ = _trace(model, two, "model", seed, Near(1.0, seed))
            if moving := moving_supports(pair, other):
                model = with_fixed_supports(model, moving)
                pair, _ = _trace(model, two, "model", seed, PriorCenters())
                single, reads = _trace(model, single_batch, "model", seed, PriorCenters())
        check_sizes(model, single, single_batch)
        latents = latents_of(single, pair)
        supports = checked_labels(model, pair, labels, data, two)
        joint = {}
        if outside := observed_outside(single):
            joint = joint_sites(model, outside, single_batch, labels)
        with untouched_store():
            factors = likelihood_factors(model, pair, two, labels)
        check_boundary(model, single_batch, "model", PriorCenters())
        check_slopes(model, single_batch)
    program = Program(
        model=model,
        guide=model,  # until it has one
        latents=latents,
        params=params_of([single], [pair]),
        closed=frozenset(),
        derived=derived_of(single),
        labels=labels,
        supports=supports,
        reads=Reads(reads, frozenset()),
        num_clients=data.num_clients,
        client_keys=data.keys,
        ranks=data.by_name.argsort(),
        prototype=single_batch,
        seed=seed,
        joint=joint,
        factors=factors,
        codes=codes_of(data),
        row_sites=row_sites,
    )
    return ModelRead(program, data, missing, (single, pair))


def _without_hidden_sites(
    model: Model, data: ClientData, two: ClientBatch, seed: int
) -> tuple[Model, Structure | None]:
    """Integrate sites of rows out of a program, and sum out discrete ones; few programs need it."""
    from hierfl.program.enumerated import summed_out
    from hierfl.program.row_orders import without_row_sites
    from hierfl.program.row_structure import LabelGivenRow

    try:
        model, structure = without_row_sites(model, data)
    except LabelGivenRow:
        return without_row_sites(summed_out(model, two), data)
    try:
        _trace(model, two, "model", seed, PriorCenters())
    except Enumerable:
        model = summed_out(model, two)
    return model, structure


@contextmanager
def _explained(what: str, batch: ClientBatch, plates: Mapping[str, int]) -> Iterator[None]:
    """Say in one sentence why a model or guide fails in this context."""
    try:
        yield
    except Exception as error:
        cause = root_of(error)
        if isinstance(cause, ProgramError):
            raise cause from None
        refuse_in_sample(error)
        raise ProgramError(why_it_fails(what, error, batch, plates)) from error


def _trace(
    program: Callable[[ClientBatch], Any],
    batch: ClientBatch,
    what: str,
    seed: int,
    handler: Messenger,
) -> tuple[Any, frozenset[str]]:
    """Return the trace of a model or guide, checked, and the fields that it reads."""
    read: set[str] = set()
    recorded = replace(
        batch,
        fields=Recorded(batch.fields, read, batch.num_rows),
        client_fields=Recorded(batch.client_fields, read),
    )
    plates = Plates(batch)
    with _explained(what, batch, plates.own), untouched_store(), no_global_draws(what, starts=True):
        # for params that start at random; the generator is restored afterwards
        noise.seed_torch(seed & 0x7FFFFFFF)
        try:
            with handler, plates:
                trace = poutine.trace(program).get_trace(recorded)
        except NoKeyedDraw:
            # of two clients at once; only shapes matter here, and `is_keyed` checks the rest
            trace = poutine.trace(program).get_trace(recorded)
    for name, site in samples(trace):
        if not is_deterministic(site):
            refuse_first(faults_of_plates(name, site, batch))
            check_density(name, site)
    return trace, frozenset(read)
