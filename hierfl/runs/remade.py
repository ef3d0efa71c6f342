"""A method made again from the record of a run: nothing in a record is trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from hierfl.core.process import at_most
from hierfl.data.absent import RowsNotSaved
from hierfl.engine.client_store import CheckpointError
from hierfl.method import Method
from hierfl.program.public_names import HAND_IN, CannotRemake
from hierfl.program.recipes import remake

T = TypeVar("T")

# Options whose number takes neither memory nor time before the next round.
FREE = frozenset(
    (
        "batch_size global_steps inner_steps local_steps max_global_size personal_steps steps "
        "target_ess"
    ).split()
)
# Up to here the numbers of a recipe cannot add up to memory that matters: about a gigabyte.
SMALL = 10**8
LARGEST = 1 << 31  # bytes of one tensor while a program with larger numbers is read
OPERATIONS = 300_000


def remade(who: Mapping[str, Any], handed: Mapping[str, Any]) -> Method:
    """Make a run's method again from its record; `handed` holds the user's own model or guide."""

    def made() -> Method:
        method = remake(who["method"], handed=handed)
        if not isinstance(method, Method):
            raise CannotRemake(
                f"the record holds no method, but a {type(method).__name__}: {HAND_IN}"
            )
        return method

    return guarded(who, made)


def guarded(who: Mapping[str, Any], work: Callable[[], T]) -> T:
    """Do what uses a method of a record, which may call for anything of hierfl."""
    try:
        with _limits(who):
            return work()
    except (CannotRemake, CheckpointError, RowsNotSaved):
        raise
    except RecursionError as error:
        raise CannotRemake(f"the record's method is nested too deep: {HAND_IN}") from error
    except Exception as error:
        raise CannotRemake(
            f"the method of the record does not run on these rows ({str(error)[:500]}): {HAND_IN}"
        ) from error


def _limits(who: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return limits on memory, where the sizes in a recipe are so large that they are needed."""
    widest = max((math.prod(_sizes(field)) for field in who["fields"].values()), default=1)
    if math.prod(_sizes(who["method"])) * widest <= SMALL:
        return nullcontext()
    return at_most(LARGEST, OPERATIONS)


def _sizes(description: Any) -> Iterator[int]:
    """Yield the whole numbers of a recipe that may be sizes; those of a guide family always may."""
    if isinstance(description, list):
        for value in description:
            yield from _sizes(value)
    elif isinstance(description, dict):
        options = description.get("with")
        parts = options if isinstance(options, dict) else description
        free = FREE if "made_by" in description else frozenset({"tensor", "code"})
        for key, value in parts.items():
            if key not in free:
                yield from _sizes(value)
    elif isinstance(description, int) and not isinstance(description, bool) and description > 1:
        yield description
