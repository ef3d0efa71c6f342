"""The method that `fit(model, data)` chooses, by the rule of docs/methods.md."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from hierfl import methods
from hierfl.core.process import one_at_a_time
from hierfl.data.clients import ClientData
from hierfl.engine.federation import Disclose, Settings, cohort_size, federate
from hierfl.guides.mean_field import mean_field
from hierfl.guides.structured import structured
from hierfl.method import Method
from hierfl.methods.stages.two_stage import seen_in
from hierfl.models.personal_heads import PersonalHeads
from hierfl.program.program import Program, ProgramError
from hierfl.program.read import ModelRead, read_model
from hierfl.program.sites import Model, recipe_of
from hierfl.summaries.reading import is_curved, read_likelihood

# two_stage: v numbers read by a likelihood; a v x v matrix for each row is 80 KB at 100. A Gaussian one
# takes v^3 and D^3 a client at each of some thousand scales: 18 CPU s at v = 97, 100 at v = 202.
MOST_READ, MOST_OF_GAUSSIAN = 100, 200
# two_stage: K global numbers; it decomposes K x K matrices, as do fedlaplace and pvi.
MOST_SHARED = 300
# Unknowns, D + K, above which a guide is mean_field: `structured` keeps D x (K + D) at a client.
MANY = 1000
# Global times local numbers up to which fedlaplace takes seconds a round, not minutes.
SLOW = 1000
# what two_stage or fedlaplace cannot differentiate raises (ProgramError is a ValueError)
FAILS = (RuntimeError, ValueError, NotImplementedError, TypeError, AttributeError, IndexError)
NETWORKS = frozenset({"bayesian_network", "network", "learned_prior_network"})


@dataclass(frozen=True, eq=False)
class Choice:
    """A method for a model, why in one line, its program, and warnings for the run to repeat."""

    method: Method
    why: str
    program: Program | None
    caught: tuple[warnings.WarningMessage, ...] = ()


@one_at_a_time
def choose(
    model: Model,
    data: ClientData,
    *,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
    cohort: int | float | None = None,
    seed: int = 0,
    agreed: Callable[[Program], Program] | None = None,
) -> Choice:
    """Choose a model's method by the rule of docs/methods.md, with what nodes `agreed` on, if they did."""
    whole = cohort_size(cohort, data.num_clients) == data.num_clients
    everyone = whole and settings.on_client_error != "skip"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read = read_model(model, data, seed=seed)
        if agreed is not None:
            read = replace(read, program=agreed(read.program))
        latents, recipe = read.program.latents, recipe_of(model)
        ours = recipe is not None and recipe.factory.__module__.startswith("hierfl.models")
        facts = _ModelFacts(
            model=model,
            read=read,
            caught=caught,
            shared=latents.global_block.size,
            own=latents.local_block.size,
            made_by=recipe.factory.__name__ if recipe is not None and ours else "",
        )
        choice = _chosen(facts, settings.disclose, everyone=everyone)
    return replace(choice, caught=tuple(caught))


def _chosen(facts: "_ModelFacts", disclose: Disclose, *, everyone: bool) -> Choice:
    model = facts.model
    if facts.read.program.params:
        return _of_params(facts)
    if (unknowns := facts.shared + facts.own) > MANY:
        if hasattr(model, "declared"):
            raise too_large(facts)
        why = f"{unknowns:,} unknowns are too many for covariances"
        return facts.chosen(methods.fedsvi(model, mean_field), why)
    if facts.made_by in NETWORKS:
        return facts.chosen(methods.fedsvi(model, mean_field), "the model is a Bayesian network")
    if not unknowns:
        return facts.structured("the model has no unknowns")
    if disclose == "summaries":
        return _two_stage(facts)
    return _of_sums(facts, everyone=everyone)


def too_much(method: Method, data: ClientData) -> ValueError:
    """Return the error of a method that shows summaries where only sums may cross; it names another."""
    other = choose(method.model, data, settings=Settings(disclose="sums")).method.name
    what = f"disclose is 'sums', and method '{method.name}' shows the server a summary"
    return ValueError(f"{what} of each client: use hierfl.methods.{other}(model)")


def too_large(facts: "_ModelFacts") -> ProgramError:
    """Return the error of a formula with more coefficients than any method has covariances for."""
    sites = facts.read.program.latents.sites
    largest = max(sites, key=lambda site: site.size)
    where = "a client's own" if largest.is_local else "for all clients"
    return ProgramError(
        f"the formula has {facts.shared:,} global parameters and {facts.own:,} of each client, of which "
        f"'{largest.name}' has {largest.size:,} {where}: hierfl.fit accepts {MANY:,} in all. The posterior "
        f"is exact if a client's rows read up to {MOST_OF_GAUSSIAN} of them and the response is normal, "
        f"and fast up to {MOST_READ} otherwise. Make the groups with most levels the clients, or "
        "leave out a term; for means without covariances, name a method: formula = formula.on(frame), "
        "hierfl.fit(hierfl.methods.fedsvi(formula, hierfl.guides.mean_field), frame, rounds=2000)"
    )


# ------------------------------------------------------------------ what the model declares
@dataclass(frozen=True, eq=False)
class _ModelFacts:
    """A model, what was read of it, warnings, and counts of its `shared` and `own` unknowns."""

    model: Model
    read: ModelRead
    caught: list[warnings.WarningMessage]
    shared: int
    own: int
    made_by: str

    def chosen(self, method: Method, why: str, program: Program | None = None) -> Choice:
        if program is None and method.model is self.model:
            program = self.read.under(method.guide)
        return Choice(method, f"{method.name}, since {why}", program)

    def structured(self, why: str) -> Choice:
        return self.chosen(methods.fedsvi(self.model, structured), why)


# ------------------------------------------------------------------ rows of the table
def _of_params(facts: _ModelFacts) -> Choice:
    model, params, made = facts.model, facts.read.program.params, facts.made_by
    what = f"param '{min(p.name for p in params)}' is learned, without a prior"
    if isinstance(model, PersonalHeads):
        why = "the model is PersonalHeads, whose params are learned"
        return facts.chosen(methods.fedvi(model), why)
    if made in ("learned_prior_network", "bregman_network"):
        method = methods.fedmap if made == "learned_prior_network" else methods.pfedbred
        return facts.chosen(method(model), f"the model is {made}, whose prior is learned")
    if not facts.read.program.latents.sites:
        if any(spec.is_local for spec in params):
            why = f"{what}, some at each client, and no site is latent"
            return facts.chosen(methods.fedrep(model, joint=True), why)
        return facts.chosen(methods.fedavg(model), f"{what}, and no site is latent")
    if facts.shared + facts.own > MANY or made in NETWORKS:
        why = f"{what}, and the model is a network"
        return facts.chosen(methods.fedsvi(model, mean_field), why)
    return facts.structured(what)


def _two_stage(facts: _ModelFacts) -> Choice:
    """Return two_stage where it takes the model and is fast, else fedsvi."""
    if facts.shared > MOST_SHARED:
        return facts.structured(f"{facts.shared} global parameters are too many for two_stage")
    method = methods.two_stage(facts.model)
    try:
        program = facts.read.under(method.guide)
        if program.unmapped_line:
            raise _SlowDraws(program.unmapped_line)
        reading = read_likelihood(program)
        size, clients = reading.size, facts.read.data.num_clients
        small = size**3 + clients * facts.own**3 <= MOST_OF_GAUSSIAN**3 or size <= MOST_READ
        exact = small and seen_in(program).spread is not None
        if small:  # of local sites that are not Normal, more is read
            reading = seen_in(program).hierarchy.reading
            size = reading.size
        largest = MOST_OF_GAUSSIAN if exact else MOST_READ
        # along a predictor, expected curvatures are those of slopes
        curved = exact or size > largest or is_curved(reading, seen_in(program).score.line.inside)
    except _SlowDraws as error:
        fix = "name a method, hierfl.fit(hierfl.methods.fedsvi(model), data, rounds=200)"
        what = f"the model fails {error}; or {fix}"
        raise ProgramError(f"{what}, which takes one client and one draw at a time") from None
    except FAILS as error:
        facts.caught.clear()
        return facts.structured(f"two_stage cannot fit the model ({_first(error)})")
    size_in_words = f"{size} parameter" + "s" * (size != 1)
    if size > largest:
        why = f"a client's likelihood reads {size_in_words}, too many for two_stage"
        return facts.structured(why)
    if not curved:  # as of quantiles (asymmetric Laplace)
        return facts.structured("the likelihood has no curvature, which two_stage's factors need")
    form = "is Gaussian in" if exact else "reads only"
    why = f"every unknown has a prior, and a client's likelihood {form} {size_in_words}"
    return facts.chosen(method, why, program)


class _SlowDraws(Exception):
    """A line of the model by which draws cannot be carried together."""


def _of_sums(facts: _ModelFacts, *, everyone: bool) -> Choice:
    """Return fedlaplace where it takes the model and is fast, else fedsvi."""
    only = "the server may see only sums, and"
    if not facts.shared:
        return facts.structured(f"{only} no site is global, so there is nothing to send")
    if not everyone:
        return facts.structured(f"{only} fedlaplace needs all clients each round")
    if facts.shared * facts.own > SLOW:
        sizes = f"{facts.shared} x {facts.own}"
        return facts.structured(f"{only} {sizes} unknowns are too many for fedlaplace")
    method = methods.fedlaplace(facts.model)
    try:
        program = facts.read.under(method.guide)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run says them
            federate(method, facts.read.data, program=program)
    except FAILS as error:
        facts.caught.clear()
        return facts.structured(f"{only} fedlaplace cannot fit the model ({_first(error)})")
    return facts.chosen(method, f"{only} every unknown has a prior", program)


def _first(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    return line.partition(". ")[0].rstrip(".") or type(error).__name__
