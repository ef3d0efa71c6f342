"""The settings of a fit that most calls leave at their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hierfl.core.arguments import expect_count, spelled

Engine = Literal["vectorized", "sequential"]
Disclose = Literal["summaries", "sums"]

# field -> the values it may have
WORDS: dict[str, tuple[object, ...]] = {
    "engine": ("vectorized", "sequential"),
    "compile": ("auto", True, False),
    "on_client_error": ("raise", "skip"),
    "disclose": ("summaries", "sums"),
}


@spelled
@dataclass(frozen=True)
class Settings:
    """How a fit is computed, who takes part, and what the server may see.

    Args:
        engine: "vectorized" carries many clients at once; "sequential" runs one after another, so
            that breakpoints and prints work. Both give the same numbers.
        chunk: clients carried at once by "vectorized"; None: as many as fit the cache.
        compile: whether local steps are compiled, which agrees with eager steps to rounding. "auto"
            compiles where the run is long enough to repay it, by the seconds of one eager step and
            the number of its operations; for self-stopping methods, the expected number of rounds
            is used. A resumed run keeps the first one's choice. From the second round on,
            `torch.get_num_threads()` processes share the chunks of a compiled run (on Linux).
        device: where clients work, such as "cuda"; the server, the client states and the returned
            fit stay on the CPU.
        on_client_error: "raise" stops the run at a client that fails, or whose update is not
            finite. "skip" leaves such a client out of that round: its client state stays as it
            was, and `history["left_out"]` and the report name it with the reason; without any
            client left the run stops. With either, `history["far_out"]` names updates of at least
            ten times the median norm and far out of the cohort's spread.
        min_rows: clients with fewer rows take no part and send nothing; a warning names them, and
            `Fit.personalize` infers their states afterwards. An update of a client with few rows
            reveals much about each of them (docs/disclosure.md).
        disclose: what the server may see. "summaries": a summary of each client, as in a
            meta-analysis (`Method.discloses`). "sums": only sums over clients, so that secure
            aggregation would do; a method that needs more is refused, and none is chosen.

    Raises:
        TypeError: `chunk` or `min_rows` is no integer.
        ValueError: a word is none of those listed, or `chunk` or `min_rows` is below 1.
    """

    engine: Engine = "vectorized"
    chunk: int | None = None
    compile: Literal["auto"] | bool = "auto"
    device: str | torch.device = "cpu"
    on_client_error: Literal["raise", "skip"] = "raise"
    min_rows: int = 1
    disclose: Disclose = "summaries"

    def __post_init__(self) -> None:
        """Refuse a value that a field cannot have."""
        for name, words in WORDS.items():
            value = getattr(self, name)
            if value not in words:
                *others, last = map(repr, words)
                raise ValueError(f"{name} is {value!r}: it must be {', '.join(others)} or {last}")
        if self.chunk is not None:
            expect_count(self.chunk, "chunk")
        expect_count(self.min_rows, "min_rows")
