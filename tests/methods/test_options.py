"""Options of methods out of their range, or none of the words an option may be."""

from typing import Any

import pytest

from hierfl import methods, models
from hierfl.methods.wrappers.differentially_private import noise_for_epsilon
from tests.methods.cases import net, shared

BAD: dict[str, dict[str, Any]] = {
    "apfl": {"alpha": 1.5},
    "averaging_some": {"share": 0.0},
    "clustered_fl": {"mean_norm": -1.0, "client_norm": -1.0, "warmup_rounds": -1},
    "fald": {"common_noise": 1.5, "steps": 0, "step_size": 0.0, "burn_in": 1.0, "draws": 0},
    "fedabml": {"server": "em", "draws": 0, "inner_steps": 0},
    "fedamp": {"prox": -1.0, "alpha": 0.0, "sigma": 0.0},
    "fedavg": {"prox": -1.0},
    "fedbabu": {"tune": "body", "tune_steps": 0},
    "fedem": {"personalize_steps": 0},
    "fedep": {"damping": 1.5},
    "fedfomo": {"models": -1},
    "fedhb": {"prior_clients": -1.0, "prior_freedom": -1.0, "prior_spread": -1.0},
    "fedhb_mixture": {"networks": 0, "spread": 0.0},
    "fedmap": {
        "weights": "size",
        "server": "mean",
        "restart": "never",
        "loss": "total",
        "init": "best",
    },
    "fedpa": {"burn_in": 5, "shrinkage": -0.1},
    "fedpop": {"step_size": 0.0, "temperature": -1.0, "kept_draws": 0, "burn_in": 10},
    "fedsvi": {"average": 1.0, "global_steps": 0, "draws": 0, "merge": "mean"},
    "fedvi": {"kl_weight": -1.0, "prior_weight": -1.0},
    "fedwba": {"particles": 0, "prior_width": 0.0},
    "fine_tuned": {"steps": 0, "when": "never"},
    "fola": {"trust": -1.0, "fisher_rows": 0},
    "heur_fedamp": {"prox": -1.0, "sigma": -1.0, "self_weight": 1.5},
    "ifca": {"clusters": 0},
    "per_fedavg": {"meta": "second", "difference": 0.0},
    "pfedbred": {"strategy": "mega", "inner_steps": 0},
    "pfedhb": {"mean_penalty": -1.0, "variance_penalty": -1.0},
    "pfedhn": {"embedding_size": 0, "clipping_norm": 0.0},
    "pfedvem": {"head_steps": 0, "draws": 0},
    "pvi": {"damping": 0.0, "power": 0.0, "alpha": 1.5, "loss": "hinge", "divergence": "js"},
    "qlsd": {"memory": -0.1, "levels": 0, "temperature": -1.0},
    "quantized": {"bits": 4},
    "robust": {"rule": "mean", "tolerated": 0.5},
    "scaffold": {"weights": "n"},
    "two_stage": {"draws": 99},
}
WRAPPERS = ("averaging_some", "fine_tuned", "quantized", "robust")


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [(name, option, value) for name, bad in BAD.items() for option, value in bad.items()],
)
def test_an_option_out_of_range_is_refused(name: str, option: str, value: Any) -> None:
    inner: Any = methods.fedavg(shared()) if name in WRAPPERS else shared()
    for wrong in (value, float("nan")):
        with pytest.raises(ValueError, match=rf"^{option} is .*: it must be (in|one of) "):
            getattr(methods, name)(inner, **{option: wrong})


def test_options_with_two_in_one_or_none_left_out() -> None:
    for betas, at in (((1.0, 0.5), 0), ((0.5, 1.5), 1)):
        with pytest.raises(ValueError, match=rf"betas\[{at}\] is .*: it must be in "):
            methods.fedivon(shared(), betas=betas)
    for beta in (-1.0, float("inf")):
        with pytest.raises(ValueError, match=r"beta is .*: it must be in \[0, inf\)"):
            methods.over_relaxed(methods.fedavg(shared()), beta)
    for norm, noise in ((0.0, 1.0), (1.0, -1.0), (float("inf"), 1.0)):
        with pytest.raises(ValueError, match=r"it must be in \(0, inf\)"):
            methods.differentially_private(
                methods.fedavg(shared()), clipping_norm=norm, noise_multiplier=noise
            )
    for epsilon, cohort in ((0.0, 2), (1.0, 11)):
        with pytest.raises(ValueError, match="it must be in "):
            noise_for_epsilon(epsilon, clients=10, cohort=cohort, rounds=3)
    with pytest.raises(ValueError, match=r"feature_weight is -1\.0: it must be in \[0, inf\)"):
        methods.fedpac(models.HeadedNetwork(net(2), head="2"), feature_weight=-1.0)
