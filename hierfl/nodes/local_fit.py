"""What a node answers about its client after the rounds: draws, summaries, predictions and scores of `hierfl.Fit`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import numpy as np
import pandas as pd
import torch
from msgspec import Meta
from torch import Tensor

from hierfl.core.disk import private_folder, write_private
from hierfl.core.tables import table_of_rows
from hierfl.core.trees import Tree, tree_map
from hierfl.data.clients import ClientData
from hierfl.effects.imputed import COLUMNS, NothingMissing
from hierfl.engine.rounds import Progress, settle
from hierfl.formulas.disclosure import columns_of_scores, scores_of_few
from hierfl.nodes.account import Entry, Ledger, digest
from hierfl.nodes.client_state import Node, state_after, with_mail
from hierfl.nodes.messages import Refused, StateRequest, to_bytes
from hierfl.nodes.row_sets import keep_in, kept_in
from hierfl.posterior.prediction import Prediction
from hierfl.runs.result import Fit

QUANTILES = (0.05, 0.5, 0.95)
SCORES = "scores"  # whose columns are kept, in the account
ANSWERS = "answers"  # a folder in the node's
MOST_KEPT = 1 << 28  # bytes of it
# site of groups within the client -> those with few rows
Few = dict[str, list[Annotated[int, Meta(ge=0, lt=1 << 31)]]]


def local_fit(node: Node, tree: Tree, question: StateRequest) -> Fit:
    """Return the fit of a node's client alone; refuse where it has no state of the round it was counted in."""
    own = with_mail(node.federation.client, state_after(node, question.counted), tree["mail"])
    table = tree_map(lambda v: v[None].clone(), own)
    # the server's state is not here, and its last message is all that a fit asks of it
    server = replace(node.federation.server, final=lambda said, clock: said)
    federation = replace(node.federation, server=server)
    settle(federation, tree["message"], table)
    progress = Progress(tree["message"], table, (), question.rounds)
    return Fit(node.method, federation, progress, max(question.rounds, 1))


def answered(
    node: Node, tree: Tree, question: StateRequest, few: Few, ledger: Ledger | None, least: int
) -> Tree:
    """Answer a question into the node's folder; return it for the policy to release, with 0 of `few` groups.

    Scores that tell of fewer than `least` rows are added to `few`; of an answer that stays there is no ledger.
    """
    kind, how = question.kind, {"draws": question.draws, "seed": question.seed}
    if kind in ("predictions", "scores"):
        try:
            node.federation.program.observed_site(question.site)
        except (KeyError, ValueError) as error:
            raise Refused(str(error)[:500]) from error
    fit = local_fit(node, tree, question)
    if kind == "imputed":
        table = pd.DataFrame(columns=COLUMNS)
        with suppress(NothingMissing):
            table = fit.imputed(**how).frame
        _write(node, question, "csv", table.to_csv(index=False).encode())
        return {}
    if kind in ("predictions", "scores"):
        released, scored = _of_rows(node, fit, question, tree["rows"])
        if scored is not None and ledger is not None:
            hidden = _check_scores(node, ledger, scored, least)
            few |= {name: [0] for name in hidden}
            released |= {name: torch.zeros_like(released[name]) for name in hidden}
        return released
    draws = {name: value[:, 0] for name, value in fit.draws(**how).own.items()}
    if kind == "draws":
        _write(node, question, "safetensors", to_bytes(draws, {"run": node.run}))
    else:
        table = table_of_sites({name: _summary(value) for name, value in draws.items()})
        _write(node, question, "csv", table.to_csv(index=False).encode())
    for name, places in few.items():
        draws[name] = draws[name].index_fill(1, torch.tensor(places), 0.0)
    return draws if kind == "draws" else {n: _summary(value) for n, value in draws.items()}


def few_rows(node: Node, least: int, asked: Mapping[str, Tensor]) -> Few:
    """Return the groups of a formula within the client that have some rows, and fewer than `least`.

    Rows that are `asked` about may be of none of them.
    """
    fields, small = node.federation.data.fields, {}
    for of in getattr(node.method.model, "layouts", ()):
        for term in of.at("within"):
            counts = fields[term.index].long().bincount()
            few = ((counts > 0) & (counts < least)).nonzero()[:, 0]
            if len(few):
                small[term.site] = few.tolist()
            if torch.isin(asked.get(term.index, few[:0]).long(), few).any():
                raise Refused(f"it asks about groups with fewer than {least} rows (min_count)")
    return small


def without_few(tree: Tree, few: Few) -> Tree:
    """Return draws, summaries or scores with NaN where they are of few rows, of which a node sends 0; refuse others."""
    for name, places in few.items():
        of, at = tree.get(name, {}), torch.tensor(places)
        tensors = {"": of} if isinstance(of, Tensor) else of
        dims = {n: int(v.dim() > 0 and n not in ("mean", "sd")) for n, v in tensors.items()}
        if not dims or any(tensors[part].index_select(k, at).any() for part, k in dims.items()):
            raise Refused(f"it tells of groups of '{name[:40]}' that it says have few rows")
        hidden = {part: tensors[part].index_fill(k, at, torch.nan) for part, k in dims.items()}
        tree = {**tree, name: hidden.get("", hidden)}
    return tree


def _summary(draws: Tensor) -> Tree:
    sd = draws.std(0) if len(draws) > 1 else torch.zeros_like(draws[0])
    # torch's own quantile takes at most 2^24 numbers
    quantiles = torch.from_numpy(np.quantile(draws.numpy(), QUANTILES, axis=0)).to(draws.dtype)
    return {"mean": draws.mean(0), "sd": sd, "quantiles": quantiles}


def table_of_sites(summaries: Mapping[str, Tree]) -> pd.DataFrame:
    """Return summaries of sites as a table: site, mean, sd, and the quantiles of 5, 50 and 95%."""
    rows = []
    for name, of in summaries.items():
        columns = [of["mean"].flatten(), of["sd"].flatten(), *of["quantiles"].reshape(3, -1)]
        for k, at in enumerate(np.ndindex(*of["mean"].shape)):
            entry = f"[{', '.join(map(str, at))}]" if at else ""
            rows.append((name + entry, *(float(v[k]) for v in columns)))
    return pd.DataFrame(rows, columns=["site", "mean", "sd", "5%", "50%", "95%"])


def _of_rows(
    node: Node, fit: Fit, question: StateRequest, fields: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Prediction | None]:
    """Return an answer about rows, and what is scored of the node's own rows."""
    rows = node.federation.data if not fields else _new_rows(node, fields)
    how: Any = {"site": question.site, "draws": question.draws, "seed": question.seed}
    predicted, name = fit.predict(rows, **how), "given.csv" if fields else "csv"
    if question.kind == "scores":
        scores = predicted.scores()
        _write(node, question, name, scores.to_csv().encode())
        numbers = {str(n): torch.tensor(v, dtype=torch.float64) for n, v in scores.iloc[0].items()}
        return numbers, None if fields else predicted
    columns = {of: getattr(predicted, of) for of in ("mean", "sd", "label", "log_score")}
    _write(node, question, name, table_of_rows(columns).to_csv(index=False).encode())
    return {of: value for of in ("mean", "sd") if (value := columns[of]) is not None}, None


def _check_scores(node: Node, ledger: Ledger, scored: Prediction, least: int) -> set[str]:
    """Return the scores that, with the columns of the rows and earlier scores, tell of few rows; keep the others'."""
    every, labels = scored.ordered(), {*node.federation.program.labels.values()}
    parts = (None if of is None else of.double().numpy() for of in (every.sd, every.counts))
    columns = columns_of_scores(every.kind, every.mean.double().numpy(), *parts)
    fields = [v.numpy() for name, v in node.federation.data.fields.items() if name not in labels]
    about = digest(msgspec.json.encode(node.behind.row_set, order="sorted"))
    earlier = [e.request for e in ledger.entries if (e.kind, e.subject) == (SCORES, (about,))]
    kept = (np.frombuffer(kept_in(ledger.folder, name)) for name in earlier)
    before = [of.reshape(len(every.mean), -1) for of in kept]
    few, new = scores_of_few(columns, fields, before, least)
    if (name := digest(content := new.tobytes())) not in earlier and new.size:
        keep_in(ledger.folder, name, content)
        ledger.append(Entry(SCORES, name, subject=(about,)))
    return few


def _new_rows(node: Node, fields: Mapping[str, Tensor]) -> ClientData:
    """Return rows that a message holds, as rows of the node's client."""
    lengths = {len(v) if v.dim() else 0 for v in fields.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise Refused(f"its rows have {sorted(lengths)} entries: each field must have as many")
    own, program = node.federation.data, node.federation.program
    for name in (program.codes.keys() & fields) - {*program.labels.values()}:
        (low, high), codes = program.codes[name], fields[name]
        if codes.dtype != own.fields[name].dtype or codes.min() < low or codes.max() > high:
            # -1 would be the last group, and a mask or a code beyond the last any other one
            raise Refused(f"field '{name}' has codes other than those agreed on, {low} to {high}")
    names = {*fields, *own.client_fields}
    return replace(
        own,
        fields=dict(fields),
        offsets=torch.tensor([0, *lengths], dtype=torch.long),
        features={name: v for name, v in own.features.items() if name in names},
        levels={name: v for name, v in own.levels.items() if name.partition("[")[0] in names},
        frame_rows=None,
    )


def _write(node: Node, question: StateRequest, ending: str, content: bytes) -> None:
    """Write an answer for the owner; the oldest ones go first where they take too much space."""
    folder = node.folder / ANSWERS
    private_folder(folder)
    name = f"{node.run}-{question.kind}-{question.draws}-{question.seed}.{ending}"
    write_private(folder / name, content)
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    sizes = np.cumsum([path.stat().st_size for path in files])
    for path, upto in list(zip(files, sizes, strict=True))[1:]:
        if upto > MOST_KEPT:
            path.unlink()
