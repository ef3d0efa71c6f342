"""What stays the same from round to round: settings, program, client, server, data, and the chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from operator import attrgetter
from typing import Literal, get_args

import torch
from torch import Tensor

from hierfl.core.arguments import expect, expect_count, spelled
from hierfl.core.process import device_of, keep_memory
from hierfl.core.trees import Tree
from hierfl.data.batch import cut_ragged
from hierfl.data.clients import ClientData
from hierfl.engine.compiled import Graphs
from hierfl.method import Client, Method, Server
from hierfl.program.check_dependence import check_mini_batches
from hierfl.program.program import Program
from hierfl.program.read import read
from hierfl.program.sites import recipe_of

# at least: with fewer, of a small network, starting an operation takes as long as running it
CLIENTS_PER_CORE = 4
CHUNK_BYTES = 13 << 20  # of a chunk of clients: a larger one leaves the caches and is no faster
FEW_ROWS = 1 << 12  # clients times rows of a chunk that cost no more than another chunk's overhead
TOGETHER_BYTES = 1 << 28  # rows of clients whose steps are taken together
PADDING_BYTES = 1 << 26  # of a chunk: clients of other lengths are then carried apart
ACCELERATOR_BYTES = 1 << 30  # the same on an accelerator, whose many cores need large chunks
COUNT, TOGETHER = attrgetter("count"), attrgetter("together")
Engine = Literal["vectorized", "sequential"]
Disclose = Literal["summaries", "sums"]


@spelled
@dataclass(frozen=True)
class Settings:
    """How a fit is computed, who takes part, and what the server may see.

    Args:
        engine: "vectorized" computes many clients at once; "sequential" computes one after another,
            so that breakpoints and prints work. Both give the same numbers.
        chunk: clients computed at once by "vectorized". None: as many as fit the cache.
        compile: whether local steps are compiled; they agree with eager steps up to rounding.
            "auto" compiles if the run is long enough to repay it, judged by the time and the number
            of operations of one eager step; for self-stopping methods, the expected number of
            rounds is used. A resumed run keeps the first choice. From the second round on,
            `torch.get_num_threads()` processes share the chunks of a compiled run (on Linux).
        device: where clients work, such as "cuda"; the server, the client states and the returned
            fit stay on the CPU.
        on_client_error: "raise" stops the run if a client fails or its update is not finite. "skip"
            leaves such a client out of the round: its client state stays as it was, and
            `history["left_out"]` and the report name it with the reason. If no client is left, the
            run stops. With either, `history["far_out"]` names updates whose norm is at least ten
            times the median and far outside the cohort's spread.
        min_rows: clients with fewer rows take no part and send nothing; a warning names them, and
            `Fit.personalize` infers their states afterwards. An update of a client with few rows
            reveals much about each of them (docs/disclosure.md).
        disclose: what the server may see. "summaries": a summary of each client, as in a
            meta-analysis (`Method.discloses`). "sums": only sums over clients, so that secure
            aggregation is possible; a method that needs more is refused and never chosen.

    Raises:
        TypeError: `chunk` or `min_rows` is not an integer.
        ValueError: an option is not one of those listed, or `chunk` or `min_rows` is below 1.
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
        expect(
            engine=(self.engine, get_args(Engine)),
            compile=(self.compile, ("auto", True, False)),
            on_client_error=(self.on_client_error, ("raise", "skip")),
            disclose=(self.disclose, get_args(Disclose)),
        )
        if self.chunk is not None:
            expect_count(self.chunk, "chunk")
        expect_count(self.min_rows, "min_rows")


@dataclass(frozen=True, eq=False)
class Federation:
    """What stays the same from round to round."""

    method: Method
    program: Program
    client: Client
    server: Server
    data: ClientData
    seed: int = 0
    cohort: int = 1
    settings: Settings = Settings()
    graphs: Graphs | None = None

    def __repr__(self) -> str:
        engine = self.settings.engine
        return f"Federation({self.data!r}, cohort of {self.cohort}, {engine}, seed {self.seed})"

    @cached_property
    def device(self) -> torch.device:
        """Where clients work."""
        return device_of(self.settings.device)

    @cached_property
    def rows(self) -> ClientData:
        """The clients' rows, on the device."""
        return self.data.to(self.device)

    @property
    def at_once(self) -> bool:
        """Whether clients are carried under `torch.vmap`, and steps may be compiled."""
        return self.settings.engine != "sequential" and self.program.in_vmap

    @property
    def may_compile(self) -> bool:
        """Whether compiling may repay: clients are carried together, and no step nests derivatives."""
        return self.at_once and not any(p.nested for p in filter(COUNT, self.client.phases))

    @cached_property
    def _bytes(self) -> tuple[int, int]:
        """Size of a row, and of a client's params."""
        rows = sum(v[:1].nbytes for v in self.data.fields.values())
        return rows, sum(spec.start.nbytes for spec in self.program.params)

    @property
    def slots(self) -> int:
        """Clients carried at once, at most."""
        return self.slots_of(int(self.data.counts.max()))

    @property
    def together(self) -> bool:
        """Whether each operation of a step is one for all clients."""
        phases = list(filter(COUNT, self.client.phases))
        return bool(phases) and all(map(TOGETHER, phases))

    def slots_of(self, most: int) -> int:
        """Return how many clients of `most` rows are carried at once, at most."""
        if not self.at_once:
            return 1
        if self.settings.chunk is not None:
            return self.settings.chunk
        row_bytes, state_bytes = self._bytes
        if self.together:
            return max(1, TOGETHER_BYTES // (row_bytes * most + 1))
        phases = filter(COUNT, self.client.phases)
        rows = max((phase.batch_size or most for phase in phases), default=1)
        slot_bytes = row_bytes * rows + state_bytes + 1
        if self.device.type != "cpu":
            return max(1, ACCELERATOR_BYTES // slot_bytes)
        # an eager step starts its operations one by one, which pays only for several clients at once
        return max(1 if self.graphs else 8, min(4096, CHUNK_BYTES // slot_bytes))

    @property
    def cores(self) -> int:
        """Chunks that run at once, each in a process on one core; 1 unless steps are compiled."""
        if self.graphs is None or not self.at_once or self.device.type != "cpu":
            return 1
        chunks = self.cohort // min(CLIENTS_PER_CORE, self.slots)
        return max(1, min(torch.get_num_threads(), chunks))

    def parts(self, ids: Tensor, message: Tree) -> tuple[Tensor, ...]:
        """Split clients into chunks of nearly equal size; `like_rows` chunks hold row counts within a factor 4."""
        counts = self.data.counts[ids].clamp(min=1)
        if self.at_once and self.client.like_rows(message):
            if len(ids) * int(counts.max()) <= FEW_ROWS:
                return ids.split(self.slots)
            kind = (counts.log2() / 2.0).ceil()
            return tuple(part for k in kind.unique() for part in ids[kind == k].split(self.slots))
        if self.together and len(ids) > self.slots:  # as the largest client lets few be carried
            kind = (counts.log2() / 4.0).ceil()
            kinds = [ids[kind == k] for k in kind.unique()]
            split = [own.split(self.slots_of(int(self.data.counts[own].max()))) for own in kinds]
            return self.cut([part for own in split for part in own])
        cores = min(self.cores, len(ids))
        fewest = -(-len(ids) // (self.slots * cores)) * cores  # as many for each core
        number = fewest
        while len(ids) % number and number < 2 * fewest:
            number += cores
        return self.cut(ids.split(-(-len(ids) // (number if number < 2 * fewest else fewest))))

    def cut(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return chunks that are cut again where one is mostly padding (`cut_ragged`)."""
        for phase in (*self.client.phases, *(self.client.adapt or ())):
            if phase.batch_size is None and phase.count:
                break
        else:
            return tuple(parts)
        row_bytes, state_bytes = self._bytes
        limit = CHUNK_BYTES // (row_bytes + state_bytes)
        return cut_ragged(
            parts,
            self.data.counts,
            most=self.settings.chunk or max(1, min(4096, limit)),
            few=CHUNK_BYTES // max(1, row_bytes),
            padding=PADDING_BYTES // max(1, row_bytes),
        )

    def slots_to_fill(self, parts: Sequence[Tensor], message: Tree) -> int:
        """Return how many clients chunks are padded to, for one compiled shape; 0: none."""
        if self.graphs is None or not self.at_once or self.client.like_rows(message):
            return 0
        slots = max(map(len, parts))
        by_rows = any(phase.batch_size is None and phase.count for phase in self.client.phases)
        added = max((slots - len(p)) * int(self.data.counts[p].max()) for p in parts)
        return 0 if by_rows and added * self._bytes[0] > PADDING_BYTES else slots


def federate(
    method: Method,
    data: ClientData,
    *,
    seed: int = 0,
    cohort: int | float | None = None,
    settings: Settings = Settings(),
    program: Program | None = None,
) -> Federation:
    """Check a method's program against the data, and set up what stays the same in all rounds."""
    keep_memory()
    size = cohort_size(cohort, data.num_clients)
    if method.everyone:
        _check_everyone(method, settings, all_clients=size == data.num_clients)
    device_of(settings.device)
    program = program or read(method.model, method.guide, data, seed=seed)
    client, server = method.client(program), method.server(program)
    _check_steps_fit(program, client, data)
    if server.mail is not None:
        _check_mail(method, client)
    return Federation(
        method=method,
        program=program,
        client=client,
        server=server,
        data=data,
        seed=seed,
        cohort=size,
        settings=settings,
    )


def cohort_size(cohort: int | float | None, population: int) -> int:
    """Return the number of clients a round: None for all, a count, or a share in (0, 1]."""
    if cohort is None:
        return population
    if not isinstance(cohort, Integral):
        if not 0.0 < cohort <= 1.0:
            raise ValueError(
                f"cohort is {cohort}: a share of the clients lies in (0, 1]; for a count give an "
                "integer"
            )
        return max(1, round(float(cohort) * population))
    if not 1 <= cohort <= population:
        raise ValueError(f"a cohort of {cohort} cannot be drawn from {population} clients")
    return int(cohort)


def _check_everyone(method: Method, settings: Settings, *, all_clients: bool) -> None:
    """Refuse smaller cohorts and skipped clients where a method needs all clients each round."""
    if settings.on_client_error == "skip":
        raise ValueError(
            f"{method.name} sums the updates of all clients in each round, so none can be left "
            "out: use on_client_error='raise', or remove the client from the data"
        )
    if not all_clients:
        raise ValueError(
            f"{method.name} sums the updates of all clients in each round, which a smaller cohort "
            "cannot replace: leave cohort=None, or use a method of many small rounds (fedsvi)"
        )


def _check_mail(method: Method, client: Client) -> None:
    """Refuse mail of a method that discloses sums, and mail without a place in the client state."""
    if method.discloses == "sums":
        raise TypeError(
            f"{method.name} sends mail to single clients, so its server knows more than sums: "
            'declare Method(..., discloses="summaries")'
        )
    if not client.mail:
        raise TypeError(
            f"{method.name} sends mail to single clients, and their state has no place for it: "
            "make Client.own a named tuple with a field for it, and name that in Client.mail"
        )


def _check_steps_fit(program: Program, client: Client, data: ClientData) -> None:
    """Refuse mini-batches or halves that the program gives another density for."""
    if program.factors:
        _check_factors(program, client, int(data.counts.max()))
    phases, halves, scores = 0, False, False
    for phase in filter(COUNT, (*client.phases, *(client.adapt or ()))):
        halves = halves or phase.rows != "all"
        if phase.batch_size or phase.rows != "all":
            phases, scores = phases + 1, scores or phase.scores_rows
    if phases:
        check_mini_batches(program, data, priors_alone=not scores, halves=halves)


def _check_factors(program: Program, client: Client, most: int) -> None:
    """Refuse parts of the rows under a factor of all of a client's rows, which they do not give."""
    whole = [name for name, of_rows in program.factors.items() if not of_rows]
    for phase in filter(COUNT, client.phases) if whole else ():
        what, fix = "", ""
        if phase.batch_size and phase.batch_size < most:
            what = f"a mini-batch of {phase.batch_size} rows does"
            fix = "use batch_size=None, or"
        elif phase.rows != "all":
            what, fix = "half of its rows do", "set split=False, or use"
        if what:
            raise ValueError(
                f"factor '{whole[0]}' has one value per client, computed from its rows, and {what} "
                f"not give it: {fix} a factor inside batch.data()"
            )


def step_sizes(method: Method) -> tuple[str, ...]:
    """Return the options of a method that set step sizes, a wrapper's own first."""
    recipe = recipe_of(method)
    options = {} if recipe is None else recipe.options
    own: list[str] = []
    inner: list[str] = []
    for name, value in options.items():
        if name.endswith(("optimizer", "step_size")) and value is not None:
            own.append(name)
        if isinstance(value, Method):
            inner += step_sizes(value)
    return tuple(dict.fromkeys([*own, *inner]))
