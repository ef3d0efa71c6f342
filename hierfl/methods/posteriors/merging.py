"""The server's merge of clients' Gaussians: means of natural parameters, or of means and scales."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributions import Transform, transform_to

from hierfl.core.trees import Tree
from hierfl.guides.global_sites import normal_params
from hierfl.program.program import Params, Program, ProgramError

Merge = Literal["gradient", "natural", "wasserstein"]
MERGES = get_args(Merge)


@dataclass(frozen=True)
class Averaged:
    """How clients' copies of global variational params are averaged; other params by their mean."""

    scales: Mapping[str, str]  # the mean of an independent Gaussian -> its scale
    links: Mapping[str, Transform]  # a scale -> its map from unconstrained values
    dense: bool  # whether `_shared` is a Gaussian with all correlations
    natural: bool

    def sent(self, params: Params) -> Tree:
        """Return what a client sends of its copy, to be averaged."""
        sent = dict(params)
        if self.dense:
            scale = self.links["_shared.scale"](sent.pop("_shared.scale"))
            unit = params["_shared.lower"].tril(-1) + torch.eye(len(scale))
            root = torch.linalg.solve_triangular(
                scale[:, None] * unit, torch.eye(len(scale)), upper=False
            )
            precision = root.mT @ root
            return sent | {
                "_shared.loc": precision @ params["_shared.loc"],
                "_shared.lower": precision,
            }
        for loc, name in self.scales.items():
            scale = self.links[name](params[name])
            sent[name] = scale**-2 if self.natural else scale
            sent[loc] = params[loc] * scale**-2 if self.natural else params[loc]
        return sent

    def merged(self, mean: Tree) -> Params:
        """Return the params at the mean of what clients sent."""
        if self.dense:
            precision = mean["_shared.lower"]
            loc = torch.linalg.solve(precision, mean["_shared.loc"])
            return {**mean, **normal_params(loc, precision)}
        params = dict(mean)
        for loc, name in self.scales.items():
            scale: Tensor = mean[name].rsqrt() if self.natural else mean[name]
            params[name] = self.links[name].inv(scale)
            params[loc] = mean[loc] * scale**2 if self.natural else mean[loc]
        return params


def averaged_by(program: Program, merge: Merge) -> Averaged | None:
    """Return the merge of a program's guide, None by gradients; refuse a guide that it is not for."""
    if merge == "gradient":
        return None
    specs = {spec.name: spec for spec in program.params if not spec.is_local}
    scales, foreign = {}, set()
    for base in ("_shared", *(site.name for site in program.latents.global_block.sites)):
        if {f"{base}.loc", f"{base}.scale"} <= specs.keys():
            scales[f"{base}.loc"] = f"{base}.scale"
        gaussian = {f"{base}.{part}" for part in ("loc", "scale", "lower", "at")}
        foreign |= {name for name in specs if name.startswith(f"{base}.")} - gaussian
    dense = "_shared.lower" in specs
    points = all(
        f"{site.name}.at" in specs or f"{site.name}.loc" in scales
        for site in program.latents.global_block.sites
    )
    if foreign or not (points or "_shared.loc" in scales):
        raise ProgramError(
            f"merge={merge!r} averages Gaussians, and the guide's posterior of the global sites is "
            "another: use guides.mean_field, structured, conditional or delta, or merge='gradient'"
        )
    if dense and merge == "wasserstein":
        raise ProgramError(
            "merge='wasserstein' of Gaussians with correlations is not a mean over clients: use "
            "merge='natural', or a guide without them, structured(shared=diagonal_normal)"
        )
    links = {name: transform_to(specs[name].constraint) for name in scales.values()}
    return Averaged(scales, links, dense, natural=merge == "natural")
