"""Fingerprints (part -> hash) of a user's code and modules, comparable under one Python version."""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

Fingerprint = dict[str, str]
Part = tuple[str, str]

PYTHON = "python"  # the key of the version that compiled the code
CODE = "code"  # how the keys of parts begin that are comparable within one version
OF_TORCH = (torch.dtype, torch.device, torch.Size)
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), np.generic, *OF_TORCH)
# Functions of these packages count by name: they change with releases, not with a user's program.
RELEASED = frozenset(sys.stdlib_module_names) | {"hierfl", "numpy", "pyro", "torch"}
INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib")})
TRAINED_OTHERWISE = (_DropoutNd, _NormBase, torch.nn.RNNBase, torch.nn.MultiheadAttention)
HAS_DOCSTRING = 0x4000000  # flag of code objects from Python 3.14 on


def fingerprint(thing: object, *, fixed: bool = False) -> Fingerprint:
    """Return the fingerprint of something; `fixed`: the weights of modules are constants."""
    lines = _Parts(_package(thing)).of(thing, "", fixed=fixed)
    return {PYTHON: sys.implementation.cache_tag or sys.version, **dict(lines)}


def differing(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Return the parts in which two fingerprints differ; code only for equal Python versions."""
    same = first.get(PYTHON) == second.get(PYTHON)
    paths = [p for p in {**first, **second} if p != PYTHON and (same or not p.startswith(CODE))]
    return [part for part in paths if first.get(part) != second.get(part)]


class _Parts:
    """One walk through an object of a package, whose functions are compared by their code."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.seen: dict[int, object] = {}  # kept alive, so that no id is used twice

    def of(self, thing: Any, where: str, *, fixed: bool = False) -> Iterator[Part]:
        if isinstance(thing, PLAIN):
            yield _in("value", where), _hash(f"{type(thing).__name__} {thing!r}")
            return
        if id(thing) in self.seen:
            return
        self.seen[id(thing)] = thing
        if isinstance(thing, torch.Tensor | np.ndarray):
            yield _in("value", where), _hash_of_array(thing)
        elif isinstance(thing, tuple | list | set | frozenset | Mapping):
            yield from self._of_container(thing, where, fixed)
        elif isinstance(thing, ModuleType):
            yield _in("module", where), _hash(thing.__name__)
        elif isinstance(thing, torch.nn.Module):
            yield from self._of_network(thing, where, fixed)
        elif hasattr(thing, "__recipe__"):
            fixed = fixed or thing.__recipe__.options.get("prior_loc") == "module"
            yield from self.of(thing.__recipe__.factory, _in("factory", where))
            yield from self._of_attributes(thing.__recipe__.options, where, fixed)
        elif isinstance(thing, FunctionType):
            yield from self._of_function(thing, where, fixed)
        elif isinstance(thing, type):
            yield from self._of_class(thing, where)
        else:
            yield from self._of_object(thing, where, fixed)

    def _of_container(self, thing: Any, where: str, fixed: bool) -> Iterator[Part]:
        if isinstance(thing, set | frozenset):  # their order depends on the process
            thing = sorted(repr(v) if isinstance(v, PLAIN) else str(type(v)) for v in thing)
        pairs = list(thing.items() if isinstance(thing, Mapping) else enumerate(thing))
        if all(isinstance(value, PLAIN) for _, value in pairs):
            yield _in("value", where), _hash(f"{type(thing).__name__} {pairs!r}")
            return
        yield _in("length", where), _hash(str(len(pairs)))
        for place, (key, value) in enumerate(pairs):
            name = repr(key) if isinstance(key, PLAIN) else f"entry {place}"
            yield from self.of(value, _in(name, where), fixed=fixed)

    def _of_network(self, module: torch.nn.Module, where: str, fixed: bool) -> Iterator[Part]:
        """Yield layers, shapes, and the values of buffers and of weights that are not learned."""
        yield _in("layers", where), _hash(repr(module))
        for name, weight in module.named_parameters():
            constant = fixed or not weight.requires_grad
            yield _in(f"weight '{name}'", where), _hash_of_array(weight, contents=constant)
        for name, buffer in module.named_buffers():
            yield _in(f"buffer '{name}'", where), _hash_of_array(buffer)
        for name, part in module.named_modules():
            here = _in(f"layer '{name}'", where) if name else where
            yield from self.of(type(part), here)
            own = {k: v for k, v in vars(part).items() if not k.startswith("_")}
            if not _depends_on_training(type(part)):
                own.pop("training", None)
            yield from self._of_attributes(own, here, fixed)

    def _of_attributes(self, own: Mapping[str, Any], where: str, fixed: bool) -> Iterator[Part]:
        for name, value in own.items():
            yield from self.of(value, _in(f"attribute '{name}'", where), fixed=fixed)

    def _of_function(self, function: FunctionType, where: str, fixed: bool) -> Iterator[Part]:
        ours = self._is_ours(function, function.__code__.co_filename)
        if ours:
            yield _in(CODE, where), _hash(_text_of(function.__code__))
        else:
            yield _in("name", where), _hash(f"{function.__module__}:{function.__qualname__}")
        for kind, name, value in values_of(function):
            part = f"closure's '{name}'" if kind == "closure" else f"default of '{name}'"
            yield from self.of(value, _in(part, where), fixed=fixed)
        if not ours:
            return
        for name in sorted(_globals_of(function.__code__) & function.__globals__.keys()):
            yield from self.of(function.__globals__[name], _in(f"global '{name}'", where))

    def _of_class(self, kind: type, where: str) -> Iterator[Part]:
        if not self._is_ours(kind, _file_of(kind)):
            yield _in("type", where), _hash(f"{kind.__module__}:{kind.__qualname__}")
            return
        for name, value in vars(kind).items():
            inner = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(inner, FunctionType):
                yield from self.of(inner, _in(f"method '{name}'", where))
            elif isinstance(inner, PLAIN) and not name.startswith("__"):
                yield from self.of(inner, _in(f"attribute '{name}'", where))
        for above in kind.__bases__:
            yield from self.of(above, _in(f"base '{above.__qualname__}'", where))

    def _of_object(self, thing: Any, where: str, fixed: bool) -> Iterator[Part]:
        if isinstance(thing, functools.partial):
            state: Any = {"function": thing.func, "args": thing.args, "keywords": thing.keywords}
        elif isinstance(thing, MethodType):
            state = {"function": thing.__func__, "self": thing.__self__}
        elif inspect.isroutine(thing):
            yield _in("name", where), _hash(repr(getattr(thing, "__qualname__", type(thing))))
            return
        else:
            yield from self.of(type(thing), where)
            state = _state_of(thing, self._is_ours(type(thing), _file_of(type(thing))))
        yield from self._of_attributes(state, where, fixed)

    def _is_ours(self, thing: Any, file: str) -> bool:
        """Return whether something belongs to the user's program, and is compared by its code."""
        package = _package(thing)
        if package in RELEASED:
            return False
        return package == self.package or not file.startswith(INSTALLED)


def _depends_on_training(layer: type) -> bool:
    """Return whether a layer computes something else in training than in evaluation."""
    if layer.__module__.startswith("torch."):
        return issubclass(layer, TRAINED_OTHERWISE)
    forward = getattr(getattr(layer, "forward", None), "__code__", None)
    return forward is None or "training" in forward.co_names


def values_of(function: FunctionType) -> Iterator[tuple[str, str, Any]]:
    """Yield ("closure" or "default", name, value) of all that a function carries with it."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield "closure", name, cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    pairs = zip(names[len(names) - len(defaults) :], defaults, strict=True)
    for name, value in (*pairs, *(function.__kwdefaults__ or {}).items()):
        yield "default", name, value


def _state_of(thing: Any, ours: bool) -> dict[str, Any]:
    """Return what tells objects of one type apart; nothing if only the type is known."""
    if is_dataclass(thing):
        return {f.name: getattr(thing, f.name) for f in fields(thing)}
    if isinstance(thing, torch.distributions.Distribution):
        extra = ("base_dist", "transforms", "reinterpreted_batch_ndims")
        names = [*thing.arg_constraints, *(n for n in extra if n in vars(thing))]
        return {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    is_plain = isinstance(thing, SimpleNamespace | Namespace | torch.distributions.Transform)
    return dict(getattr(thing, "__dict__", {})) if ours or is_plain or callable(thing) else {}


def _globals_of(code: CodeType) -> set[str]:
    """Return the names of the globals that code reads, with those of functions inside it."""
    reading = ("LOAD_GLOBAL", "LOAD_NAME")
    read = {str(s.argval) for s in dis.get_instructions(code) if s.opname in reading}
    return read.union(*(_globals_of(c) for c in code.co_consts if isinstance(c, CodeType)))


def _text_of(code: CodeType) -> str:
    """Return what a code object does, without its lines, file and docstring."""
    constants = list(code.co_consts)
    has_docstring = not code.co_name.startswith("<")
    if sys.version_info >= (3, 14):
        has_docstring = bool(code.co_flags & HAS_DOCSTRING)
    if constants and isinstance(constants[0], str) and has_docstring:
        constants[0] = None
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    names = (code.co_names, code.co_varnames[: sum(counts)], code.co_freevars, code.co_cellvars)
    steps = (code.co_code.hex(), code.co_exceptiontable.hex(), code.co_flags & ~HAS_DOCSTRING)
    return f"{(*steps, counts, names)!r} {[_text_of_constant(value) for value in constants]!r}"


def _text_of_constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _text_of(value)
    if isinstance(value, frozenset):  # its order depends on the process
        return f"frozenset {sorted(map(repr, value))!r}"
    if isinstance(value, tuple):
        return f"tuple {[_text_of_constant(v) for v in value]!r}"
    return f"{type(value).__name__} {value!r}"


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _package(thing: Any) -> str:
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return str(module).partition(".")[0]


def _in(what: str, where: str) -> str:
    """Return the name of a part, such as "code of global 'scale'"; `where` is "" for the whole."""
    return f"{what} of {where}" if where else what


def _hash_of_array(values: Any, *, contents: bool = True) -> str:
    text = f"{values.dtype} {tuple(values.shape)}"
    if not contents or getattr(values, "is_meta", False):
        return _hash(text)
    if isinstance(values, np.ndarray):
        return _hash(text, b"" if values.dtype.hasobject else values.tobytes())
    plain = values.detach().cpu()
    if plain.layout is not torch.strided or plain.is_quantized:
        return _hash(text, repr(plain).encode())
    flat = plain.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return _hash(text, flat.view(torch.uint8).numpy().tobytes())


def _hash(text: str, content: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + b"\0" + content).hexdigest()[:16]
