"""Which method `fit(model, data)` takes: the rule of docs/methods.md, from what the model declares."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from hierfl import methods
from hierfl.data.clients import ClientData
from hierfl.engine.federation import cohort_size, federate
from hierfl.engine.settings import Disclose, Settings
from hierfl.guides.delta import delta
from hierfl.guides.mean_field import mean_field
from hierfl.guides.structured import structured
from hierfl.method import Method
from hierfl.models.personal_heads import PersonalHeads
from hierfl.program.program import Program
from hierfl.program.read import read
from hierfl.program.recipes import recipe_of
from hierfl.program.sites import Model
from hierfl.summaries.expectations import seen_line
from hierfl.summaries.reading import read_likelihood
from hierfl.summaries.seen_hierarchy import seen_hierarchy

# The numbers that a likelihood reads, v, for which two_stage is taken: a client's factor is a
# matrix of v x v, and it is the mean of one such matrix for each of its rows, 80 KB at 100.
MOST_READ = 100
# The global numbers for which two_stage is taken: the server decomposes K x K matrices at each of
# its draws, and 300 is also the limit of fedlaplace and pvi.
MOST_SHARED = 300
# The unknowns of one client and the global level together, above which a guide is mean_field:
# `structured` keeps a D x (K + D) matrix at each client, a million numbers here.
MANY = 1000
# Global times local numbers up to which fedlaplace takes seconds a round; above, it warns that it
# takes minutes.
SLOW = 1000
# what a program may raise that two_stage or fedlaplace cannot differentiate; a ProgramError is a
# ValueError
FAILS = (RuntimeError, ValueError, NotImplementedError, TypeError, AttributeError, IndexError)
NETWORKS = frozenset({"bayesian_network", "network", "batch_norm_network", "learned_prior_network"})


@dataclass(frozen=True, eq=False)
class Choice:
    """A method for a model.

    Args:
        method: made as the user would have made it.
        why: the method's name and the reason, in one line.
    """

    method: Method
    why: str


def choose(
    model: Model,
    data: ClientData,
    *,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
    cohort: int | float | None = None,
    seed: int = 0,
) -> Choice:
    """Choose a method for a model by the rule of docs/methods.md. The same arguments give the same choice.

    Args:
        model: a function of a `ClientBatch`.
        data: the clients' training rows.
        settings: of the fit: what the server may see, and whether clients may be missing from a
            round.
        cohort: clients a round, as in `hierfl.fit`.
        seed: of the run.

    Raises:
        ValueError: bad data; `cohort` is out of range.
        ProgramError: a model that cannot be run as it is written.
    """
    whole = cohort_size(cohort, data.num_clients) == data.num_clients
    everyone = whole and settings.on_client_error != "skip"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run of the chosen method says them
        program = read(model, delta, data, seed=seed)
        # `delta` has one param for each site
        learned = {p.name for p in program.params} - {f"{s.name}.at" for s in program.latents.sites}
        if learned:
            return _of_params(model, program, sorted(learned))
        if _is_large(program):
            return _of_network(model, program)
        if _made_by(model) in NETWORKS:
            return _chosen(methods.fedsvi(model, mean_field), "the model is a Bayesian network")
        if not program.latents.global_block.size:
            return _structured(model, "no site is global, so that clients have nothing in common")
        if settings.disclose == "summaries":
            return _two_stage(model, program, data)
        return _of_sums(model, program, data, everyone=everyone)


def check_disclosed(method: Method, data: ClientData, disclose: Disclose) -> None:
    """Refuse a method that shows the server a summary of each client where only sums may cross.

    Args:
        method: to run.
        data: the clients' training rows.
        disclose: what the server may see.

    Raises:
        ValueError: the method discloses more; the message names another method.
    """
    if disclose == "sums" and method.discloses == "summaries":
        other = choose(method.model, data, settings=Settings(disclose="sums")).method.name
        raise ValueError(
            f"disclose is 'sums', and method '{method.name}' shows the server a summary of each "
            f"client: take hierfl.methods.{other}(model)"
        )


# ------------------------------------------------------------------------------------ rows of the table
def _of_params(model: Model, program: Program, learned: list[str]) -> Choice:
    """Return the method that a model with params to be learned belongs to."""
    what = f"param '{learned[0]}' is learned, without a prior"
    made = _made_by(model)
    if isinstance(model, PersonalHeads):
        return _chosen(methods.fedvi(model), "the model is PersonalHeads, whose params are learned")
    if made == "learned_prior_network":
        return _chosen(
            methods.fedmap(model), "the model is learned_prior_network, whose prior is learned"
        )
    if made == "bregman_network":
        return _chosen(
            methods.pfedbred(model), "the model is bregman_network, whose prior is learned"
        )
    if not program.latents.sites:
        if any(spec.is_local for spec in program.params):
            return _chosen(
                methods.fedbn(model), f"{what}, some at each client, and no site is latent"
            )
        return _chosen(methods.fedavg(model), f"{what}, and no site is latent")
    if _is_large(program) or made in NETWORKS:
        return _chosen(methods.fedsvi(model, mean_field), f"{what}, and the model is a network")
    return _structured(model, what)


def _of_network(model: Model, program: Program) -> Choice:
    size = program.latents.global_block.size + program.latents.local_block.size
    return _chosen(
        methods.fedsvi(model, mean_field), f"{size:,} unknowns are too many for covariances"
    )


def _two_stage(model: Model, program: Program, data: ClientData) -> Choice:
    """Return two_stage where it takes the model and is fast, else fedsvi.

    The program is read as two_stage reads it; its server is not set up, which takes seconds.
    """
    shared = program.latents.global_block.size
    if shared > MOST_SHARED:
        return _structured(model, f"{shared} global numbers are too many for two_stage")
    method = methods.two_stage(model)
    try:
        reading = read_likelihood(read(model, method.guide, data))
        if reading.size > MOST_READ:
            return _structured(
                model, f"a client's likelihood reads {reading.size} numbers, too many for two_stage"
            )
        seen_hierarchy(reading)
        seen_line(reading)
    except FAILS as error:
        return _structured(model, f"two_stage does not take the model ({_first(error)})")
    numbers = f"{reading.size} number" + "s" * (reading.size != 1)
    return _chosen(
        method, f"every unknown has a prior, and a client's likelihood reads {numbers} only"
    )


def _of_sums(model: Model, program: Program, data: ClientData, *, everyone: bool) -> Choice:
    """Return fedlaplace where it takes the model and is fast, else fedsvi."""
    shared, own = program.latents.global_block.size, program.latents.local_block.size
    if not everyone:
        return _structured(
            model, "only sums may cross, and fedlaplace needs all clients each round"
        )
    if shared * own > SLOW:
        return _structured(
            model, f"only sums may cross, and {shared} x {own} unknowns are too many for fedlaplace"
        )
    method = methods.fedlaplace(model)
    try:
        federate(method, data)
    except FAILS as error:
        why = f"only sums may cross, and fedlaplace does not take the model ({_first(error)})"
        return _structured(model, why)
    return _chosen(method, "every unknown has a prior, and only sums may cross")


def _structured(model: Model, why: str) -> Choice:
    return _chosen(methods.fedsvi(model, structured), why)


def _chosen(method: Method, why: str) -> Choice:
    return Choice(method, f"{method.name}, since {why}")


# ------------------------------------------------------------------------------------ what the model declares
def _is_large(program: Program) -> bool:
    return program.latents.global_block.size + program.latents.local_block.size > MANY


def _made_by(model: Model) -> str:
    """Return the builder in `hierfl.models` that made a model; "" for any other."""
    recipe = recipe_of(model)
    if recipe is None or not recipe.factory.__module__.startswith("hierfl.models"):
        return ""
    return recipe.factory.__name__


def _first(error: Exception) -> str:
    """Return the beginning of a message, up to its mend."""
    line = str(error).partition("\n")[0]
    return line.partition(". ")[0].rstrip(".") or type(error).__name__
