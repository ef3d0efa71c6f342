"""Categorical responses: one of several levels without an order."""

from __future__ import annotations

from hierfl.models.families.family import Response, ResponseFamily, no_parameters
from hierfl.models.families.links import unit_scale
from hierfl.program.recipes import recorded


def _outputs(response: Response) -> int:
    """Return the number of levels but the first, which is the reference."""
    if len(response.levels) < 2:
        raise ValueError(
            f"a categorical response has {len(response.levels)} levels: it needs 2 or more"
        )
    return len(response.levels) - 1


@recorded
def categorical() -> ResponseFamily:
    """Return the family of responses in K unordered levels; the first is the reference.

        y ~ Categorical(softmax(0, eta_1, ..., eta_{K - 1}))

    The response is a code 0, 1, ..., K - 1, and the linear predictor has K - 1 columns.

    >>> categorical().outputs(Response(float("nan"), float("nan"), ("a", "b", "c")))
    2
    """
    return ResponseFamily(
        name="categorical",
        link="logit",
        kind="category",
        likelihood="dist.Categorical(logits=torch.nn.functional.pad(eta, (1, 0)))",
        parameters=no_parameters,
        scale=unit_scale,
        outputs=_outputs,
    )
