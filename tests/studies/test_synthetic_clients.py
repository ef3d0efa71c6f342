"""FedMAP's synthetic clients: their sizes, their skews and their maps."""

import numpy as np
import pytest
import torch

from hierfl.studies.drawn_clients import Skew, _rows, synthetic_clients


@pytest.mark.parametrize("skew", ["feature", "quantity", "label"])
def test_synthetic_clients_have_the_published_sizes_and_skews(skew: Skew) -> None:
    train, test = synthetic_clients(skew, seed=1, rows=400)
    counts = train.counts + test.counts
    assert counts.tolist() == [400] * 5 + [100 if skew == "quantity" else 400] * 5
    assert torch.allclose(train.counts / counts, torch.full((10,), 0.7), atol=0.01)
    for k in range(10):
        own = [rows.select([k]) for rows in (train, test)]
        ones = torch.cat([part.fields["y"] for part in own]).mean()
        assert float(ones) == pytest.approx(0.15 if skew == "label" and k >= 5 else 0.5)
        x = own[0].fields["x"]
        assert torch.allclose(x.mean(0), torch.zeros(30), atol=1e-10) and torch.allclose(
            x.std(0, unbiased=False), torch.ones(30)
        )
    again = synthetic_clients(skew, seed=1, rows=400)[0].fields["x"]
    assert torch.equal(again, train.fields["x"])
    assert not torch.equal(synthetic_clients(skew, seed=2, rows=400)[0].fields["x"], again)


def test_classes_are_a_blob_and_a_shell_in_four_dimensions() -> None:
    x = _rows(np.repeat([0.0, 1.0], 20_000), np.random.Generator(np.random.Philox(0)))
    blob, shell = np.linalg.norm(x[:20_000, :4], axis=1), np.linalg.norm(x[20_000:, :4], axis=1)
    assert (blob**2).mean() == pytest.approx(8.0, rel=0.03)
    assert (shell.mean(), shell.var()) == (
        pytest.approx(8.0, rel=0.01),
        pytest.approx(2.0, rel=0.05),
    )
    assert x[:, 4:].var() == pytest.approx(9.0, rel=0.02)
    with pytest.raises(ValueError, match="skew is 'rows'"):
        synthetic_clients("rows", seed=0)  # type: ignore[arg-type]
