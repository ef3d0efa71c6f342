"""Which global params are the mean and scale of local priors, seen by giving each a value of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Transform, transform_to

from hierfl.core.trees import Tree
from hierfl.method import Server
from hierfl.methods.parts.averaging import averaging_server
from hierfl.program.handlers import unchecked
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.traces import has_mean


def at_prior(program: Program, theta: Params) -> Params:
    """Return local params of `delta` or `mean_field` at which the posterior is the prior."""
    priors, starts, links = program.priors(theta), program.start()[1], links_of(program)
    params: Params = {}
    for site in program.latents.local_block.sites:
        prior = priors[site.name]
        middle = site.transform.inv(prior.mean)
        params |= {f"{site.name}.at": middle, f"{site.name}.loc": middle}
        if f"{site.name}.scale" in starts:
            params[f"{site.name}.scale"] = links[f"{site.name}.scale"].inv(prior.stddev)
    if not starts.keys() <= params.keys():
        missing = min(starts.keys() - params.keys())
        raise ProgramError(
            f"param '{missing}' has no start at the prior: use the guide delta, or mean_field"
        )
    return {name: params[name] for name in starts}


def learned_hierarchy(program: Program, method: str) -> tuple[Params, Params]:
    """Return a program's global and local params, refusing one that lacks either."""
    above, mine = program.start()
    if not mine or not above:
        raise ProgramError(
            f"{method} needs local sites, and a learned prior above them: a pyro.param outside the clients plate"
        )
    return above, mine


def mean_params(program: Program) -> dict[str, str]:
    """Return, for each local site, the global param that is its prior's mean."""
    sites = [site.name for site in program.latents.local_block.sites]
    if not sites:
        raise ProgramError("this method needs local sites: give each client weights of its own")
    marked = _marked(program)
    priors, values = program.priors(marked), _constrained(program, marked)
    means = {}
    for site in sites:
        param = _same(priors[site].mean, values)
        if param is None:
            raise ProgramError(
                f"the prior's mean of site '{site}' is not a global param, and this method learns it "
                "as one: give it one, as bayesian_network(module, prior_loc='learned') does"
            )
        means[site] = param
    return means


def scale_params(program: Program) -> dict[str, str]:
    """Return, for each local site with a learned prior scale, the global param that it is."""
    marked = _marked(program)
    before, priors = program.priors(program.start()[0]), program.priors(marked)
    values, scales = _constrained(program, marked), {}
    for site in (site.name for site in program.latents.local_block.sites):
        param = _same(priors[site].stddev, values)
        if param is not None:
            scales[site] = param
        elif not torch.equal(before[site].stddev, priors[site].stddev):
            raise ProgramError(
                f"the prior's scale of site '{site}' is neither known nor a global param, elementwise: use "
                f"bayesian_network(module, prior_scale='learned'), or server='average'"
            )
    return scales


def _marked(program: Program) -> Params:
    """Return global params with distinct entries, near enough to the start to be in any domain."""
    generator = torch.Generator().manual_seed(0)

    def marked(value: Tensor) -> Tensor:
        part = torch.rand(value.shape, generator=generator)
        # only real numbers may start at 0, and all are allowed there
        return torch.where(value == 0.0, part, value * (1.0 + 0.1 * part))

    return {name: marked(value) for name, value in program.start()[0].items()}


def links_of(program: Program) -> dict[str, Transform]:
    """Return each param's map from unconstrained values."""
    return {spec.name: transform_to(spec.constraint) for spec in program.params}


def _constrained(program: Program, params: Params) -> Params:
    links = links_of(program)
    return {name: links[name](value) for name, value in params.items()}


def _same(target: Tensor, values: Params) -> str | None:
    """Return the name of the value that equals `target` elementwise, whatever its shape."""
    for name, value in values.items():
        if value.numel() == target.numel() and torch.allclose(value.flatten(), target.flatten()):
            return name
    return None


# mean over clients, and variance about it -> the prior's mean and variance, elementwise
Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PriorMoments:
    """First and second moments of the clients' posteriors, and the prior that fits them best."""

    site: Mapping[str, str]  # global param that is a prior's mean -> its local site
    scale: Mapping[str, str]  # the same -> the param that is its scale, if learned
    links: Mapping[str, Transform]  # param -> its map from unconstrained values

    def of(self, phi: Params, theta: Params) -> Tree:
        """Return a client's posterior mean minus the prior's, and the second moment about it."""
        away, square = {}, {}
        for loc, site in self.site.items():
            mine = phi[f"{site}.loc"] if f"{site}.loc" in phi else phi[f"{site}.at"]
            scale = f"{site}.scale"
            sd = self.links[scale](phi[scale]) if scale in phi else torch.zeros_like(mine)
            away[loc] = mine.view(theta[loc].shape) - theta[loc]
            square[loc] = away[loc].square() + sd.square().view(theta[loc].shape)
        return {"away": away, "square": square}

    def best(self, theta: Params, moments: Tree, rule: Rule) -> Params:
        """Return the prior's params by a rule for the mean and the variance of each weight."""
        new = dict(theta)
        for loc, away in moments["away"].items():
            around = (moments["square"][loc] - away.square()).clamp(min=0.0)
            new[loc], variance = rule(theta[loc] + away, around)
            if loc in self.scale:
                name = self.scale[loc]
                new[name] = self.links[name].inv(variance.sqrt()).view(theta[name].shape)
        return new

    def server(self, program: Program, rule: Rule = lambda mean, around: (mean, around)) -> Server:
        """Return the server of `best`; without a rule it minimizes the mean of KL(q_i || p), EM's M-step."""

        def target(theta: Params, means: dict[str, Tree]) -> Params:
            return self.best(theta, means["moments"], rule)

        return averaging_server(program.start()[0], target)


def moments_of(program: Program) -> PriorMoments:
    """Return the moments of a program."""
    means, scales = mean_params(program), scale_params(program)
    return PriorMoments(
        site={param: site for site, param in means.items()},
        scale={means[site]: param for site, param in scales.items()},
        links=links_of(program),
    )


def at_prior_middle(program: Program, theta: Params) -> Params:
    """Return a guide's local params at their priors' means, if all clients have these, else as they start."""
    mine, block = program.start()[1], program.latents.local_block
    reads = program.reads.model & program.prototype.client_fields.keys()
    with torch.no_grad(), unchecked():
        middles = program.middle({**theta, **mine}, program.prototype)
        above = {site.name: middles[site.name] for site in program.latents.global_block.sites}
        priors = {} if reads else program.priors(theta, above)
        if not priors or not all(has_mean(prior) for prior in priors.values()):
            return mine
        means = {name: prior.mean.expand(prior.shape()) for name, prior in priors.items()}
        params = {"_local.loc": block.flatten(means)}
        for site in block.sites:
            free = site.transform.inv(means[site.name])
            params |= {f"{site.name}.at": free, f"{site.name}.loc": free}
    return {
        name: params[name].reshape(value.shape) if name in params else value
        for name, value in mine.items()
    }


def moments_and_scales(program: Program, method: str) -> PriorMoments:
    """Return the moments of a program whose priors' scales are all learned; refuse another one."""
    moments = moments_of(program)
    fixed = [loc for loc in moments.site if loc not in moments.scale]
    if fixed:
        raise ProgramError(
            f"{method} learns the variance over clients, and the scale above '{fixed[0]}' is known: "
            'use bayesian_network(module, prior_scale="learned")'
        )
    return moments
