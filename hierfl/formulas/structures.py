"""Known covariance between groups: `(1 | gr(g, cov=A))`, and neighbors, `car(M, gr=g)`, as in brms.

Groups' values are T z with independent z ~ Normal(0, s_j). The server works T out once, and the
schema holds it, so that all clients have the same one:

    gr       values ~ Normal(0, sd^2 A),                 T T' = A,            s_j = sd
    escar    values ~ Normal(0, sd^2 (D - rho M)^-1),    T = D^-1/2 U,        s_j = sd / sqrt(1 - rho w_j)
    esicar   density exp(-sum over neighbors (v_i - v_j)^2 / (2 sd^2)), sum of v = 0

M is 1 for neighbors and 0 for others, D its row sums, U and w the eigenvectors and eigenvalues of
D^-1/2 M D^-1/2; of `esicar` T = U+ L+^-1/2, of the eigenvectors of D - M with eigenvalues above 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.formulas.columns import level_name, refuse_similar
from hierfl.formulas.declaration import Declaration, Group, grouping_name
from hierfl.formulas.questions import Ask, Question
from hierfl.formulas.schema import Grouping, Schema
from hierfl.formulas.writer import check_one
from hierfl.models.families import as_source
from hierfl.models.priors import Prior

if TYPE_CHECKING:
    from hierfl.formulas.layout import GroupTerm
    from hierfl.formulas.writer import ProgramWriter

Known = tuple[tuple[str, ...], tuple[tuple[float, ...], ...]]  # names, and rows of a matrix
NEAR_ONE = 1.0 - 1e-7  # of w: the precision has no zero at rho = 1


def matrix_of(name: str, frame: Any) -> Known:
    """Return a user's matrix with the names of its groups, checked to be symmetric."""
    if not isinstance(frame, pd.DataFrame):
        fix = "pd.DataFrame(matrix, index=names, columns=names)"
        what = f"data2 has '{name}', a {type(frame).__name__}"
        raise TypeError(f"{what}: give a frame with the groups' names, {fix}")
    rows, columns = ([level_name(v) for v in of] for of in (frame.index, frame.columns))
    is_numeric = all(dtype.kind in "iufb" for dtype in frame.dtypes)
    values = frame.to_numpy(dtype=np.float64) if is_numeric else np.full(frame.shape, np.nan)
    fault = ""
    if len({*rows}) < len(rows) or rows != columns:
        what = f": the first are {', '.join(rows[:3])} and {', '.join(columns[:3])}"
        fault = f"index and columns of '{name}' in data2 are not the same names{what}"
    elif not np.isfinite(values).all():
        fault = f"'{name}' in data2 holds values that are not finite numbers: correct it"
    elif not np.allclose(values, values.T, rtol=1e-8, atol=0.0):
        fault = f"'{name}' in data2 is not symmetric: correct it"
    if fault:
        raise ValueError(fault)
    refuse_similar({*rows}, f"the groups of '{name}'")
    return tuple(rows), tuple(tuple(map(float, row)) for row in (values + values.T) / 2.0)


def basis_of(group: Group, matrix: Known) -> tuple[Any, Any]:
    """Return T (N, M) and w (M,), () if there are none; refuse a matrix that gives none."""
    values = np.array(matrix[1])
    if fault := _fault_of_matrix(group, values, matrix[0]):
        raise ValueError(fault)
    if group.kind == "gr":
        try:
            return np.linalg.cholesky(values), ()
        except np.linalg.LinAlgError as error:
            fix = "add a small number to its diagonal"
            raise ValueError(f"'{group.cov}' in data2 is not positive definite: {fix}") from error
    degree = values.sum(0)
    if group.kind == "escar":
        root = degree**-0.5
        w, vectors = np.linalg.eigh(root[:, None] * values * root)
        return root[:, None] * vectors, np.minimum(w, NEAR_ONE)
    w, vectors = np.linalg.eigh(np.diag(degree) - values)
    return vectors[:, 1:] / np.sqrt(w[1:]), ()


def _fault_of_matrix(group: Group, values: Any, names: Sequence[str]) -> str:
    """Return why a matrix is no covariance, or no neighborhood; "" if it is one."""
    name, degree = group.cov, values.sum(0)
    if group.kind == "gr":
        return ""
    if not np.isin(values, (0.0, 1.0)).all() or values.diagonal().any():
        return f"'{name}' in data2 must be 1 for neighbors, and 0 for others and on its diagonal"
    if not degree.all():
        lone = names[int((degree == 0.0).argmax())]
        return f"'{lone}' has no neighbor in '{name}': leave it out, or give it one"
    from scipy.sparse.csgraph import connected_components  # slow to import

    count, label = connected_components(values)
    if group.kind == "escar" or count == 1:
        return ""
    first, other = (names[int((label == which).argmax())] for which in (0, 1))
    what = f"no chain of neighbors joins '{first}' and '{other}' in '{name}'"
    return f"{what}, as a type 'esicar' needs: use type='escar'"


def structures(
    declared: Declaration, schema: Schema, ask: Ask, place: Callable[..., Grouping]
) -> dict[str, Grouping]:
    """Return how groups with a structure lie to the clients; `place` asks for those that are no clients."""
    clients = [*ask(Question("rows"))]
    groupings: dict[str, Grouping] = {}
    for group in declared.structured:
        matrix = declared.data2.get(group.cov)
        if matrix is None:
            fix = f"data2={{'{group.cov}': frame}}, with the groups' names as index and columns"
            raise ValueError(f"'{group.text}' needs the matrix '{group.cov}': give {fix}")
        there = f"'{group.cov}' in data2, which has {', '.join(matrix[0][:6])}"
        if group.by == (schema.clients,):
            if lost := [name for name in clients if name not in matrix[0]]:
                what = f"client '{lost[0]}' is not among the groups of {there}"
                raise ValueError(f"{what}: add it, or leave its rows out")
            lies = Grouping("above", matrix[0])
        else:
            outside = ask(Question("outside", by=group.by, levels=matrix[0]))
            if lost := [client for client, has in outside.items() if has]:
                what = f"client '{lost[0]}' has a group of '{':'.join(group.by)}' that is not in"
                raise ValueError(f"{what} {there}: add it")
            lies = place(group.by, matrix[0])
            if lies.level == "within":
                fix = f"write (1 | {grouping_name(group.by)})"
                raise ValueError(f"'{group.text}' has groups within clients: {fix}")
        basis, weights = basis_of(group, matrix)
        rows = tuple(tuple(map(float, row)) for row in basis)
        groupings[group.name] = replace(lies, basis=rows, weights=tuple(map(float, weights)))
    return groupings


# ------------------------------------------------------------ the program
def write_structure(
    out: "ProgramWriter",
    group: "GroupTerm",
    schema: Schema,
    priors: Mapping[str, Prior],
    outputs: int,
) -> None:
    """Write the values of groups with a structure, whose sd stands above."""
    check_one(group.group.text, outputs, f"use (1 | {group.group.name})")
    agreed, scale = schema.groups[group.group.name], out.scales[group.site]
    if agreed.weights:
        rho = f"rho_{group.site}"
        out.sample(rho, as_source(priors[rho]))
        weights = ", ".join(f"{w:.9g}" for w in agreed.weights)
        scale += f" * (1.0 - {out.named(rho)} * torch.tensor([{weights}])).rsqrt()"
    z, size = f"z_{group.site}", len(agreed.basis[0])
    out.sample(z, f"dist.Normal(torch.zeros({size}), {scale}).to_event(1)")
    rows = ", ".join(f"[{', '.join(f'{v:.9g}' for v in row)}]" for row in agreed.basis)
    value = f"{out.named(z)}.new_tensor([{rows}]) @ {out.named(z)}"
    out.add(f"{out.named(group.site)} = pyro.deterministic({group.site!r}, {value})")


def drawn_values(group: "GroupTerm", schema: Schema, shared: Mapping[str, Tensor]) -> Tensor:
    """Return the values of groups with a structure at each draw, (S, N)."""
    basis = torch.tensor(schema.groups[group.group.name].basis, dtype=torch.float64)
    return shared[f"z_{group.site}"] @ basis.mT
