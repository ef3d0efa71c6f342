"""The choice of a method for a model where no rows are: the server chooses, and nodes make the same by its recipe."""

from __future__ import annotations

from typing import Any

from hierfl.data.absent import FILLS
from hierfl.engine.settings import Disclose, Settings
from hierfl.method import Method
from hierfl.nodes.agreement import Agreement
from hierfl.nodes.call import FitCall
from hierfl.nodes.messages import Refused
from hierfl.program.public_names import CannotRemake
from hierfl.program.recipes import remake
from hierfl.program.sites import Model
from hierfl.runs.choice import Choice, choose

ROUNDS = (
    200  # of a chosen method that does not stop by itself, as the first attempt of `hierfl.fit`
)


def chosen(
    model: Model,
    agreement: Agreement,
    *,
    disclose: Disclose = "summaries",
    cohort: int | float | None = None,
    seed: int = 0,
) -> Choice:
    """Choose a method for a model by the rule of `hierfl.fit`, from what the nodes agreed on.

    Args:
        model: a function of a `ClientBatch`.
        agreement: what the nodes agreed on.
        disclose: what the server may see, as in `hierfl.fit`.
        cohort: clients a round, as in `hierfl.fit`.
        seed: of the run.

    Raises:
        ValueError: the model cannot be read without rows.
    """
    failed: Exception | None = None
    for fills in FILLS:
        data = agreement.few_made_up(fills)
        try:
            # nodes may be missing from a round
            settings = Settings(disclose=disclose, on_client_error="skip")
            return choose(model, data, settings=settings, cohort=cohort, seed=seed)
        except ValueError as error:  # labels outside their support, for example
            failed = failed or error
    raise ValueError(
        f"no method can be chosen without rows ({failed}): name one, hierfl.methods.two_stage(model) for example"
    ) from failed


def made_by(recipe: Any, model: Model) -> Method:
    """Return the method that a server chose for a model.

    Args:
        recipe: of the method (`hierfl.program.recipes.describe`), as the server told it; it need not be trusted.
        model: the node's own; it must be the one in the recipe.

    Raises:
        Refused: the recipe is of no method of hierfl, or of another model.
    """
    try:
        found = remake(recipe, handed={"model": model})
    except CannotRemake as error:
        raise Refused(f"the server's method cannot be made here: {error}") from error
    if not isinstance(found, Method):
        raise Refused(f"the server names a {type(found).__name__} as the method")
    return found


def at_node(call: FitCall, recipe: Any) -> Method:
    """Return the method of a call at a node: the one that was named, or the one that the server chose for its model.

    Args:
        call: as it was made at the node.
        recipe: of the server's method, as the server told it; read where the call names none.

    Raises:
        Refused: it cannot be made here.
    """
    return call.method if isinstance(call.method, Method) else made_by(recipe, call.method)


def decided(call: FitCall, agreement: Agreement) -> tuple[Method, int | None, str | None]:
    """Return the server's method, its rounds, and why it was chosen; None where it was named."""
    if isinstance(call.method, Method):
        return call.method, call.rounds, None
    found = chosen(
        call.method, agreement, disclose=call.disclose, cohort=call.cohort, seed=call.seed
    )
    endless = call.rounds is None and found.method.most_rounds is None
    return found.method, ROUNDS if endless else call.rounds, found.why
