"""Programs whose sites are all global: a client's loss at a point, and products of independent Gaussians."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vjp

from hierfl.core.trees import Tree, add, scaled, tree_map, zeros_like
from hierfl.data.batch import ClientBatch
from hierfl.method import Clock, Server, Share
from hierfl.methods.parts.prior_params import links_of
from hierfl.program.handlers import log_joint, unchecked
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Values


@dataclass(frozen=True, eq=False)
class CommonSites:
    """The global sites of a program, at unconstrained points z, a dict of tensors by site."""

    program: Program

    def start(self) -> Params:
        """Return the starting point."""
        sites = self.program.latents.global_block.sites
        return {site.name: site.free_start.detach().clone() for site in sites}

    def pieces(self, vector: Tensor) -> Params:
        """Return the point of a vector of all sites' entries."""
        block = self.program.latents.global_block
        shaped = zip(block.sites, vector.split(block.sizes), strict=True)
        return {site.name: piece.reshape(site.free_start.shape) for site, piece in shaped}

    def values(self, z: Params) -> tuple[Values, Tensor]:
        """Return the sites' values, and the sum of their log Jacobians, ()."""
        values, total = {}, torch.zeros(())
        for site in self.program.latents.global_block.sites:
            values[site.name], jacobian = site.constrain(z[site.name])
            total = total + jacobian.sum()
        return values, total

    def mean_nll(self, z: Params, batch: ClientBatch) -> Tensor:
        """Return the mean negative log likelihood of a row, ()."""
        own, _ = log_joint(self.program.model, self.values(z)[0], batch, {})
        return -(own / batch.counts).sum()

    def mean_loss(self, z: Params, batch: ClientBatch) -> Tensor:
        """Return the same less log p(z) / (N n_k), so that all rows together count the prior once."""
        values, jacobian = self.values(z)
        own, above = log_joint(self.program.model, values, batch, {})
        return -((own + self.program.share * (above + jacobian)) / batch.counts).sum()

    def log_prior(self, z: Params) -> Tensor:
        """Return log p(z), ()."""
        values, jacobian = self.values(z)
        _, above = log_joint(self.program.model, values, self.program.prototype, {})
        return above + jacobian

    def prior_slope(self, z: Params) -> tuple[Params, Params]:
        """Return the gradient and the diagonal Hessian of -log p(z), for independent priors."""
        with torch.no_grad(), unchecked():
            slope, pull = vjp(grad(self.log_prior), z)[:2]
            (bent,) = pull(tree_map(torch.ones_like, z))
        return scaled(slope, -1.0), scaled(bent, -1.0)

    def gaussian(self, z: Params, precision: Params) -> Params:
        """Return the params of the guide `mean_field` for means z and a diagonal precision."""
        links = links_of(self.program)
        params = {f"{name}.loc": value for name, value in z.items()}
        for name, value in precision.items():
            scale = f"{name}.scale"
            params[scale] = links[scale].inv(value.rsqrt())
        return params

    def served(self, message: Tree, own: Tree) -> Params:
        """Return the params of the guide `mean_field` at the message of `product_server`."""
        count = float(self.program.num_clients)
        return self.gaussian(message["z"], scaled(message["precision"], count))


def common_sites(program: Program, method: str, *, independent: bool = False) -> CommonSites:
    """Return the global sites of a program; refuse one with others, or with params, or with tied priors."""
    sites = program.latents.global_block.sites
    if program.latents.local_block.sites:
        name = program.latents.local_block.sites[0].name
        raise ProgramError(
            f"{method} infers global sites only, and '{name}' is local: use fedsvi or fedpop"
        )
    foreign = [
        spec.name
        for spec in program.params
        if not any(spec.name.startswith((f"{site.name}.", "_shared.")) for site in sites)
    ]
    if foreign or not sites:
        what = f"param '{foreign[0]}' has none" if foreign else "the model has no global site"
        raise ProgramError(
            f"{method} needs a prior of every unknown, and {what}: sample it outside the clients "
            'plate, as bayesian_network(net, local="none", global_prior=Normal(0, 1)) does'
        )
    common = CommonSites(program)
    if independent:
        _check_independent(common, method)
    return common


def _check_independent(sites: CommonSites, method: str) -> None:
    """Refuse priors whose Hessian is not diagonal, or not positive."""
    generator = torch.Generator().manual_seed(0)
    # away from the start, where a prior's mean has no slope in its scale
    z = {n: v + 0.3 * torch.rand(v.shape, generator=generator) for n, v in sites.start().items()}
    with torch.no_grad(), unchecked():
        pull = vjp(grad(sites.log_prior), z)[1]
        _, bent = sites.prior_slope(z)
    for name, value in bent.items():
        for _ in range(8):
            signs = {
                n: torch.randint(0, 2, v.shape, generator=generator).to(v) * 2.0 - 1.0
                for n, v in z.items()
            }
            with torch.no_grad():
                (mixed,) = pull(signs)
            if not torch.allclose(-mixed[name] * signs[name], value, rtol=1e-4, atol=1e-6):
                raise ProgramError(
                    f"the prior of site '{name}' depends on other sites, and {method} takes "
                    "independent ones: give it known numbers, or use pvi"
                )
        if not bool((value > 0.0).all()):
            raise ProgramError(
                f"the log prior of site '{name}' does not curve down: give it a Normal prior, or use pvi"
            )


def product_share(precision: Params, shift: Params, loss: Tensor, rows: Tensor) -> dict[str, Share]:
    """Return what a client sends to `product_server`."""
    return {
        "shift": Share(shift),
        "precision": Share(precision),
        "rows": Share(rows),
        "loss": Share(loss, rows),
    }


class ProductServerState(NamedTuple):
    """z, the mean of clients' precisions of all their rows, and the mean of their rows, ()."""

    z: Params
    precision: Params
    rows: Tensor


def product_server(
    sites: CommonSites, begin: Params, trust: float = 0.0, *, weighted: bool = True
) -> Server:
    """Return the server of a product of the clients' independent Gaussians, which sends its state."""

    def update(
        state: ProductServerState, means: dict[str, Tree], clock: Clock
    ) -> ProductServerState:
        rows = means["rows"]
        held = scaled(state.precision, trust / state.rows * rows)
        weight = add(held, means["precision"]) if weighted else zeros_like(held)
        z = tree_map(
            lambda at, moved, w: at + moved / (w if weighted else rows),
            state.z,
            means["shift"],
            weight,
        )
        return ProductServerState(z, means["precision"], rows)

    start = ProductServerState(sites.start(), begin, torch.ones(()))
    return Server(start, update, down=lambda state, clock: state._asdict())
