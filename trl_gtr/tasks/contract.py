"""The base of `Task`, `Corrector` and the other contracts: checks a subclass when it is instantiated.

Members without a default must be defined. A name close to a member's is an error: it is probably a typo, and the
default would silently be used instead.
"""

from __future__ import annotations

import difflib
import inspect
from abc import ABCMeta
from collections.abc import Mapping
from typing import Any, Self

_CUTOFF, _MAX_LENGTH_DIFFERENCE = 0.8, 2
"""How similar two names must be to count as a typo: `correct_one` is not taken for a misspelt `correct`."""


class _CheckedMeta(ABCMeta):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        contract = _contract_of(cls)
        members = _members(contract)
        for each in cls.__mro__:
            if issubclass(each, contract) and each is not contract:
                _check_spelling(cls, vars(each), {n: v for n, v in members.items() if n not in vars(each)}, contract)
        _check_nothing_missing(cls, sorted(cls.__abstractmethods__), contract)
        instance = super().__call__(*args, **kwargs)
        inherited = {name: value for name, value in members.items() if not instance.defines(name)}
        _check_spelling(cls, vars(instance), inherited, contract)
        _check_nothing_missing(cls, [name for name in inherited if name not in vars(contract)], contract)
        return instance

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's signature; `inspect.signature` would otherwise return that of `__call__`."""
        constructor: Any = inspect.getattr_static(cls, "__init__")
        if constructor is object.__init__:
            return inspect.Signature()
        signature = inspect.signature(constructor)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Contract(metaclass=_CheckedMeta):
    """Base class whose direct subclasses are contracts.

    Subclasses of a contract must define its abstract methods and its annotations without a value; the rest is
    optional.
    """

    def defines(self, name: str) -> bool:
        """Whether this object overrides the contract's default for an optional member."""
        missing = object()
        return inspect.getattr_static(self, name, missing) is not inspect.getattr_static(
            _contract_of(type(self)), name, missing
        )

    @classmethod
    def ensure(cls, thing: object) -> Self:
        """Return `thing` unchanged, or raise a helpful `TypeError` if it doesn't implement the contract."""
        if isinstance(thing, cls):
            return thing
        if isinstance(thing, type) and issubclass(thing, cls):
            raise TypeError(f"{thing.__name__} is a class: pass an instance, {thing.__name__}(...).")
        raise TypeError(f"{type(thing).__name__} is not a {cls.__name__}: subclass trl_gtr.{cls.__name__}.")


def _contract_of(cls: type) -> type:
    return next(base for base in cls.__mro__ if Contract in base.__bases__)


def _members(contract: type) -> dict[str, Any]:
    """The contract's public members and their defaults; `None` for attributes without one."""
    names = {**dict.fromkeys(inspect.get_annotations(contract)), **vars(contract)}
    return {name: value for name, value in names.items() if not name.startswith("_")}


def _check_spelling(cls: type, defined: Mapping[str, Any], members: Mapping[str, Any], contract: type) -> None:
    """Compare the names `defined` by a class or instance with the `members` it may have meant to override."""
    known = _members(contract)
    for name, value in defined.items():
        if name.startswith("_") or name in known:
            continue
        alike = {_bare(n): n for n, member in members.items() if _may_replace(value, member)}
        near = difflib.get_close_matches(_bare(name), alike, n=1, cutoff=_CUTOFF)
        if near and abs(len(near[0]) - len(_bare(name))) <= _MAX_LENGTH_DIFFERENCE:
            raise TypeError(
                f"{cls.__name__}.{name} is not a member of {contract.__name__}; did you mean `{alike[near[0]]}`? "
                f"If not, rename it, e.g. to `_{name}`."
            )


def _check_nothing_missing(cls: type, names: list[str], contract: type) -> None:
    if names:
        listed = ", ".join(f"`{name}`" for name in names)
        raise TypeError(f"{cls.__name__} must define {listed}: trl_gtr.{contract.__name__} has no default for it.")


def _bare(name: str) -> str:
    return name.replace("_", "").lower()


def _may_replace(value: Any, member: Any) -> bool:
    """A misspelt property is likely to lack its decorator too."""
    return isinstance(member, property) or _is_method(member) == _is_method(value)


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, staticmethod | classmethod)
