"""The params of methods that fit one common model: all global, no latent sites."""

from __future__ import annotations

from hierfl.program.program import Params, Program, ProgramError


def common_params(program: Program, name: str) -> Params:
    """Return the starting values of a program's params, all of them global."""
    above, own = program.start()
    if own or program.latents.sites:
        raise ProgramError(
            f"{name} fits global params only, and this model has latent sites or local params: "
            f"take models.network, or fedsvi"
        )
    return above
