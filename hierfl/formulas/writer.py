"""The lines of a program: names of its values, independent priors, and groups whose spread is reported at 0."""

import keyword
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyro.distributions as dist
import torch

from hierfl.formulas.schema import Schema
from hierfl.models.families import as_source
from hierfl.models.priors import Prior

Vector = Callable[[Sequence[str]], str]  # names of columns -> their coefficients as code
INTERCEPT = "Intercept"
THRESHOLDS = "thresholds"  # the site that ordinal families have in the intercept's place
AT_MEANS = "at the means of the predictors"
CENTERED = "_centered"  # end of the name of an intercept at the means of the columns
# Names that the program has already.
TAKEN = {
    *"pyro dist torch hierfl families batch eta loc base means read variance has".split(),
    *"lower first upper".split(),
    *keyword.kwlist,
}
NO_NAME = re.compile(r"\W+", re.ASCII)  # what an ASCII name cannot hold


def unique(name: str, taken: Collection[str]) -> str:
    """Return a name, with a number behind it where it is taken."""
    free, i = name, 2
    while free in taken:
        free, i = f"{name}_{i}", i + 1
    return free


def unique_names(prefix: str, texts: Iterable[str]) -> dict[str, str]:
    """Return an ASCII name for each text, none of them twice."""
    names: dict[str, str] = {}
    for text in texts:
        if text not in names:
            names[text] = unique(prefix + NO_NAME.sub("_", text), names.values())
    return names


@dataclass
class ProgramWriter:
    """Lines of a program so far, the Python names of its sites' values, and the next line's indent."""

    taken = TAKEN  # names that are no site's

    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    scales: dict[str, str] = field(default_factory=dict)  # site of groups -> their sds, as code
    indent: int = 1

    def add(self, line: str) -> None:
        """Add one line."""
        self.lines.append("    " * self.indent + line)

    def sample(self, site: str, distribution: str, *, note: str = "") -> None:
        """Add the line that draws a site."""
        name = self.named(site)
        # Names of levels come from data: none may end the comment and go on as code.
        note = "".join(c if c.isprintable() else "?" for c in note)
        line = f"{name} = pyro.sample({site!r}, {distribution})"
        self.add(f"{line}  # {note}" if note else line)

    def named(self, site: str) -> str:
        """Return the Python name of a site, different from all others."""
        if site not in self.names:
            plain = NO_NAME.sub("_", site).strip("_").lower() or "site"
            plain = f"b_{plain}" if plain[0].isdigit() or plain in self.taken else plain
            self.names[site] = unique(plain, self.names.values())
        return self.names[site]


# ------------------------------------------------------------ priors
def independent(priors: Mapping[str, Prior], names: Sequence[str], shape: list[int]) -> str:
    """Return some independent priors as one event, whose first dimension runs over them."""
    if not shape:
        return as_source(priors[names[0]])
    texts = [as_source(priors[name]) for name in names]
    if len(set(texts)) == 1:
        return f"{texts[0]}.expand({shape}).to_event({len(shape)})"
    chosen = [priors[name] for name in names]
    return as_source(_of_kind(chosen, shape).to_event(len(shape)))


def _of_kind(priors: Sequence[Any], shape: list[int]) -> Any:
    """Return priors of one kind as a batch of a shape whose first dimension runs over them."""
    kind = type(priors[0])
    if any(type(prior) is not kind for prior in priors):
        texts = sorted({as_source(prior) for prior in priors})
        fix = "give them priors of one kind"
        raise ValueError(f"the columns of one term have the priors {', '.join(texts)}: {fix}")
    if kind is dist.FoldedDistribution:
        return kind(_of_kind([prior.base_dist for prior in priors], shape))
    values = {
        name: torch.stack([torch.as_tensor(getattr(prior, name)) for prior in priors])
        for name in kind.arg_constraints
    }
    wide = {n: v[:, None].expand(shape) if len(shape) > 1 else v for n, v in values.items()}
    return kind(**wide)


# ------------------------------------------------------------ intercepts and slopes of groups
def means_of(group: Any, schema: Schema) -> dict[str, float]:
    """Return the means of a correlated term's numbers; {} if all are 0.

    An intercept's sd at 0 grows with the numbers' distance from 0. A prior of it in units of the
    response would pull the sd of the slopes toward 0 where the numbers are years, or ages.
    """
    if not group.cor or group.places or group.group.kind or INTERCEPT not in group.columns:
        return {}
    numbers = [name for name in group.columns[1:] if name not in group.design.coded]
    margins = {name: schema.design[name] for name in numbers}
    return {name: m.mean for name, m in margins.items() if abs(m.mean) > 1e-9 * m.sd}


def origins(model: Any) -> dict[str, list[float]]:
    """Return, by site whose intercept has its prior at the columns' means, the weights of entries in that intercept."""
    return {
        group.site: [1.0, *(means.get(name, 0.0) for name in group.columns[1:])]
        for layout in model.layouts
        for group in layout.at("clients")
        if (means := means_of(group, model.agreed))
    }


def check_one(name: str, outputs: int, fix: str) -> None:
    """Refuse a term in several predictors."""
    if outputs > 1:
        raise ValueError(f"'{name}' is for one predictor, and the response has {outputs}: {fix}")


def write_moved(
    out: ProgramWriter, group: Any, priors: Mapping[str, Prior], means: Mapping[str, float]
) -> None:
    """Write sds and correlations at the means of a term's columns, and those at 0 that follow."""
    columns = group.columns
    sd, cholesky = f"{group.sd}{CENTERED}", f"{group.cholesky}{CENTERED}"
    names = [f"{group.sd}[{name}]" for name in columns]
    note = f"{', '.join(columns)}; {AT_MEANS}"
    out.sample(sd, independent(priors, names, [len(columns)]), note=note)
    concentration = float(priors[str(group.cor)])
    out.sample(cholesky, f"dist.LKJCholesky({len(columns)}, {concentration})")
    moves = ", ".join(f"{-means.get(name, 0.0):.9g}" for name in columns[1:])
    out.add(f"lower = {out.named(sd)}[:, None] * {out.named(cholesky)}")
    out.add(f"first = lower[:1] + lower.new_tensor([[{moves}]]) @ lower[1:]  # where they are 0")
    out.add("upper = torch.linalg.qr(torch.cat([first, lower[1:]]).mT).R")
    out.add("lower = upper.mT * upper.diagonal().sign()")
    scale, factor = out.named(group.sd), out.named(group.cholesky)
    out.scales[group.site] = scale
    out.add(f"{scale} = pyro.deterministic({group.sd!r}, lower.square().sum(-1).sqrt())")
    out.add(f"{factor} = pyro.deterministic({group.cholesky!r}, lower / {scale}[:, None])")
    out.add(f"pyro.deterministic({group.cor!r}, {factor} @ {factor}.mT)")


def write_origin(out: ProgramWriter, layout: Any, vector: Vector) -> None:
    """Write the thresholds at 0, as they are reported, from those at the columns' means."""
    moved, means = out.named(f"{THRESHOLDS}{CENTERED}"), layout.threshold_means
    plain = [name for name in means if name not in layout.steps]
    by_step = [name for name in means if name in layout.steps]
    for names, wide in ((plain, ""), (by_step, "[:, None]")):
        if names:
            values = ", ".join(f"{means[name]:.9g}" for name in names)
            moved += f" + (torch.tensor([{values}]){wide} * {vector(names)}).sum(0)"
    out.add(f"{out.named(THRESHOLDS)} = pyro.deterministic({THRESHOLDS!r}, {moved})")


def write_thresholds(out: ProgramWriter, vector: str) -> None:
    """Write the thresholds of each row, moved by its columns of cs() times coefficients, a `vector`."""
    moves = f"(batch.steps[..., None] * {vector}).sum(-2)"
    before = out.named(THRESHOLDS)
    out.names[THRESHOLDS] = "thresholds_of_rows"
    out.add(f"thresholds_of_rows = {before} - {moves}")
