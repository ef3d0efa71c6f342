"""Rows known by shape only: of a fit saved without them, or at nodes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from hierfl.core.trees import tree_map
from hierfl.data.clients import ClientData
from hierfl.data.consistency import offsets_of

# Two stand-ins where rows do not matter, so that it shows where they do.
FILLS: tuple[tuple[float, float], ...] = ((0.0, 1.0), (1.0, 2.0), (0.5, 0.25))


T = TypeVar("T")
NOT_SAVED = "this fit was saved without its clients' rows, which are needed here"
HAND_IN = "pass them, hierfl.load(folder, data=...)"


class RowsNotSaved(LookupError):
    """Something needs the clients' rows, which were not saved with the fit."""


class Absent(Tensor):
    """A field of known shape and dtype; any other access raises `RowsNotSaved`."""

    fills: tuple[float, float]
    of_shape: ClassVar[frozenset[Any]] = frozenset(
        {
            *(
                vars(torch._C.TensorBase)[name].__get__
                for name in "shape dtype device ndim nbytes requires_grad is_nested layout is_quantized".split()
            ),
            *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.__len__, Tensor.element_size),
            *(Tensor.is_floating_point, Tensor.is_complex, Tensor.__getitem__),
        }
    )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what is asked of the shape, and refuse what is asked of the values."""
        masked = len(args) > 1 and isinstance(args[1], Tensor) and args[1].dtype == torch.bool
        if func not in cls.of_shape or masked:
            raise RowsNotSaved(f"{NOT_SAVED}: {HAND_IN}")
        base: Any = super()
        result = base.__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Absent):
            result.fills = args[0].fills
        return result


class Unknown(Tensor):
    """What depends on missing rows: a shape and a dtype, on the device "meta", and no values to decide anything."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute shapes alone; refuse to write into a tensor that has values."""
        name, options = getattr(func, "__name__", ""), dict(kwargs or {})
        writes = name.endswith("_") and not name.endswith("__")
        writes = writes or name in ("__set__", "__setitem__") or name.startswith("__i")
        if "out" in options or (writes and not isinstance(args[0], cls)):
            raise RowsNotSaved(f"{NOT_SAVED}: {HAND_IN}")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*_of_tensors(_shape_alone, args), **_of_tensors(_shape_alone, options))
        return _of_tensors(lambda v: v.as_subclass(cls), result)


def _shape_alone(values: Tensor) -> Tensor:
    if isinstance(values, Unknown):
        return values.as_subclass(Tensor)
    return torch.empty(values.shape, dtype=values.dtype, device="meta")


def _of_tensors(change: Callable[[Tensor], Tensor], tree: T) -> T:
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def unknown(values: Tensor) -> Tensor:
    """Return what is known of a tensor without its values: its shape and its dtype."""
    return torch.empty(values.shape, dtype=values.dtype, device="meta").as_subclass(Unknown)


class Sites(dict[str, Tensor]):
    """Values of those sites that do not depend on rows that are not there; others are refused."""

    def __missing__(self, name: str) -> Tensor:
        raise RowsNotSaved(f"{NOT_SAVED} ('{name}' depends on them): {HAND_IN}")


def absent(shape: tuple[int, ...], dtype: torch.dtype, fills: tuple[float, float]) -> Tensor:
    """Return a field without values, of the shape of rows or clients; two `fills` may stand in."""
    made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(Absent)
    made.fills = fills
    return made


def form_of(data: ClientData) -> dict[str, dict[str, list[Any]]]:
    """Return dtypes and shapes of fields, and names of columns and codes, as JSON."""
    form: dict[str, dict[str, list[Any]]] = {}
    for kind in ("fields", "client_fields"):
        tensors = getattr(data, kind).items()
        form[kind] = {n: [str(v.dtype).removeprefix("torch."), *v.shape[1:]] for n, v in tensors}
    for kind in ("features", "levels"):
        form[kind] = {name: list(labels) for name, labels in getattr(data, kind).items()}
    return form


def rows_absent(
    names: Sequence[str],
    counts: Sequence[int],
    form: Mapping[str, Mapping[str, Sequence[Any]]],
    fills: tuple[float, float],
) -> ClientData:
    """Return clients whose rows are not there."""
    offsets = offsets_of(torch.tensor(counts, dtype=torch.long))

    def made(kind: str, size: int) -> dict[str, Tensor]:
        return {
            name: absent((size, *shape), getattr(torch, dtype), fills)
            for name, (dtype, *shape) in form[kind].items()
        }

    fields, own = made("fields", int(offsets[-1])), made("client_fields", len(names))
    features, levels = labels_of(form, "features"), labels_of(form, "levels")
    return ClientData(fields, offsets, tuple(names), own, features, levels)


def labels_of(
    form: Mapping[str, Mapping[str, Sequence[str]]], kind: str
) -> dict[str, tuple[str, ...]]:
    """Return the names of columns or of codes that a form tells of, by field."""
    return {name: tuple(labels) for name, labels in form.get(kind, {}).items()}


def is_absent(data: ClientData) -> bool:
    """Return whether the clients' rows are not there."""
    return any(isinstance(v, Absent) for v in data.fields.values())


def stand_in(data: ClientData, which: int) -> ClientData:
    """Return the same clients, with one number in place of every value that is not there."""

    def filled(values: Tensor) -> Tensor:
        if not isinstance(values, Absent):
            return values
        value = torch.tensor(values.fills[which]).to(values.dtype)
        return value.expand(values.shape)

    return data.with_values(filled)
