"""FedBN: clients that were in no round, as torch's own layers; test_batch_normed.py has its steps."""

import torch
from torch.func import functional_call

import hierfl
from hierfl.methods import fedbn
from hierfl.models import network
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD
from tests.methods.test_batch_normed import line
from tests.programs import federation, fit


def test_a_client_in_no_round_predicts_by_statistics_of_its_rows() -> None:
    """At the common weights: as torch's layers do, with the client's rows as one batch in training mode."""
    data, module = federation((9, 4, 6)), line()
    method = fedbn(network(module, likelihood=normal(1.0)), optimizer=SGD(0.1))
    joined = hierfl.ClientData.from_arrays(
        ["new"] * 4, x=data.fields["x"][9:13], y=data.fields["y"][9:13]
    )
    fitted = fit(method, data, rounds=2, cohort=1)
    absent = [k for k in range(3) if not fitted.progress.table.method.seen[k]]
    assert absent
    common = {name.removeprefix("theta."): value for name, value in fitted.message.items()}
    module.train()

    def by_torch(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return functional_call(module, common, (x,))[:, 0]

    found = fitted.predict(data).mean
    for k in absent:
        its = data.row_client == k
        assert torch.allclose(found[its], by_torch(data.fields["x"][its]), atol=1e-9)
    new = fitted.personalize(joined, rounds=0).predict(joined).mean
    assert torch.allclose(new, by_torch(joined.fields["x"]), atol=1e-9)
