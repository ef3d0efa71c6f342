"""Scaling equals that of the pooled rows, for any clients, any order and any offset."""

import numpy as np
import pytest
import torch

from hierfl import ClientData, fill_missing, standardize
from hierfl.data.preprocess import (
    FieldMoments,
    client_moments,
    fit_scaling,
    merged,
    missing_features,
)

N, K = 200, 7


def rows(offset: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(N, 4)) * [1.0, 10.0, 0.01, 3.0] + offset
    x[generator.random((N, 4)) < 0.2] = np.nan
    ids = np.concatenate([np.arange(K), generator.choice(K, N - K, p=np.arange(1, K + 1) / 28)])
    return ids, x


@pytest.mark.parametrize("offset", [0.0, 5.0, 1e8])
def test_pooled_moments_are_those_of_all_rows(offset: float) -> None:
    ids, x = rows(offset)
    scaling = fit_scaling(ClientData.from_arrays(ids, x=x))
    np.testing.assert_allclose(scaling.mean, np.nanmean(x, 0), rtol=1e-13, atol=1e-13)
    # At 1e8 a client's mean is rounded to 1e-8; from raw squares the variance, 1e-4, would be off
    # by 1.
    np.testing.assert_allclose(scaling.sd, np.nanstd(x - offset, 0), rtol=1e-12 + 1e-15 * offset)


def test_moments_are_each_clients_own_and_merge_in_any_order() -> None:
    ids, x = rows()
    data = ClientData.from_arrays(ids, x=x)
    sent = client_moments(data)
    for k in range(K):
        own = x[ids == k]
        np.testing.assert_allclose(sent.mean[k], np.nanmean(own, 0), atol=1e-13)
        np.testing.assert_allclose(
            sent.square[k], np.nansum((own - np.nanmean(own, 0)) ** 2, 0), rtol=1e-10, atol=1e-14
        )
        assert sent.count[k].tolist() == (~np.isnan(own)).sum(0).tolist()
    order = torch.randperm(K, generator=torch.Generator().manual_seed(1))
    turned = merged(FieldMoments(sent.count[order], sent.mean[order], sent.square[order]))
    total = merged(sent)
    torch.testing.assert_close(turned.mean, total.mean, rtol=0, atol=1e-14)
    torch.testing.assert_close(turned.square, total.square, rtol=1e-13, atol=0)


@pytest.mark.parametrize("block", [1, 50, 10**9])
def test_moments_do_not_depend_on_their_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, x = rows()
    data = ClientData.from_arrays(ids, x=x)
    sent = client_moments(data)
    monkeypatch.setattr("hierfl.data.preprocess.BLOCK", block)
    again = client_moments(data)
    for name in ("count", "mean", "square"):
        assert torch.equal(getattr(again, name), getattr(sent, name))


def test_standardize_takes_means_and_sds_from_the_first_argument_alone() -> None:
    ids, x = rows()
    train = ClientData.from_arrays(ids, features={"x": list("abcd")}, x=x, y=np.arange(N) * 1.0)
    far = train.with_fields(x=torch.as_tensor(x) * 100.0)
    scaled, other = standardize(train, far, fields=("x", "y"))
    for field in ("x", "y"):
        values = scaled.fields[field].numpy()
        np.testing.assert_allclose(np.nanmean(values, 0), 0.0, atol=1e-12)
        np.testing.assert_allclose(np.nanstd(values, 0), 1.0, rtol=1e-12)
    assert scaled.features == {"x": ("a", "b", "c", "d")}
    sd, mean = torch.as_tensor(np.nanstd(x, 0)), torch.as_tensor(np.nanmean(x, 0))
    torch.testing.assert_close(other.fields["x"] * sd + mean, far.fields["x"], equal_nan=True)
    assert torch.equal(scaled.fields["x"].isnan(), train.fields["x"].isnan())


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_or_unseen_column_keeps_its_scale(constant: float, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    x = np.stack([np.full(30, constant), np.full(30, np.nan), np.arange(30.0)], 1)
    data = ClientData.from_arrays(np.arange(30) % 3, x=x)
    scaling = fit_scaling(data)
    assert scaling.sd[:2].tolist() == [1.0, 1.0]
    assert scaling.sd[2] > 8.0
    assert standardize(data)[0].fields["x"][:, 0].abs().max() < 1e-6 * max(1.0, abs(constant))


def test_a_field_of_any_shape_and_of_integers_is_scaled() -> None:
    x = np.random.default_rng(1).integers(0, 9, (20, 2, 3))
    (scaled,) = standardize(ClientData.from_arrays(np.arange(20) // 7, x=x))
    np.testing.assert_allclose(scaled.fields["x"], (x - x.mean(0)) / x.std(0), atol=1e-12)


def test_scaling_raises_for_infinite_values_missing_fields_and_other_shapes() -> None:
    data = ClientData.from_arrays(["u", "v"], x=[[1.0, 2.0], [np.inf, 3.0]])
    with pytest.raises(ValueError, match="field 'x' of client 'v' has an infinite value"):
        fit_scaling(data)
    with pytest.raises(KeyError, match="there is no field 'z'"):
        standardize(data, fields=("z",))
    narrow = ClientData.from_arrays([0, 1], x=[[1.0], [2.0]])
    with pytest.raises(
        ValueError,
        match=r"a row of 'x' has shape \(2,\), but the scaling was fitted to rows of shape \(1,\)",
    ):
        standardize(narrow, data)


def test_filled_rows_are_finite_and_indicate_missing_values() -> None:
    ids, x = rows()
    x[:, 1] = 1.0
    data = ClientData.from_arrays(ids, features={"x": list("abcd")}, x=x, y=np.zeros(N))
    filled = fill_missing(data, value=-7.0)
    names = filled.features["x"]
    assert names == ("a", "b", "c", "d", "a_missing", "c_missing", "d_missing")
    absent = data.fields["x"].isnan()
    assert torch.equal(filled.fields["x"][:, :4], data.fields["x"].nan_to_num(-7.0))
    for name in "acd":
        assert torch.equal(
            filled.fields["x"][:, names.index(f"{name}_missing")],
            absent[:, "abcd".index(name)].double(),
        )
    assert fill_missing(data, indicators=False).features["x"] == ("a", "b", "c", "d")


def test_train_and_test_rows_can_be_given_the_same_columns() -> None:
    train = ClientData.from_arrays([0, 1], x=[[np.nan, 1.0], [2.0, 3.0]])
    test = ClientData.from_arrays([0, 1], x=[[1.0, 1.0], [2.0, np.inf]])
    columns = missing_features(train)
    assert columns == ("x0",)
    filled = fill_missing(test, indicators=columns)
    assert filled.features["x"] == fill_missing(train).features["x"] == ("x0", "x1", "x0_missing")
    assert filled.fields["x"][:, 2].tolist() == [0.0, 0.0]
    assert filled.fields["x"][1, 1] == np.inf


def test_fill_missing_raises_for_unknown_columns_and_unsuitable_fields() -> None:
    data = ClientData.from_arrays([0, 1], x=[[1.0], [2.0]], y=[0.0, 1.0], n=[[1], [2]])
    with pytest.raises(KeyError, match="field 'x' has no column 'age': its columns are x0"):
        fill_missing(data, indicators=["age"])
    with pytest.raises(ValueError, match=r"field 'y' is torch.float64 of shape \(2,\)"):
        fill_missing(data, field="y")
    with pytest.raises(ValueError, match="field 'n' is torch"):
        fill_missing(data, field="n")
    with pytest.raises(KeyError, match="there is no field 'z'"):
        missing_features(data, "z")
