"""A method's settings as `--set KEY=VALUE` gives them: read by the types that its dataclass declares."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from factorpack.errors import PlanError
from factorpack.methods import METHODS, Method, from_fields
from factorpack.methods.method import unknown_method
from factorpack.planning.families import DEFAULT_METHOD

NONE = "none"
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a method. The key of a nested one has a dot: `solver.steps`."""

    key: str
    types: tuple[Any, ...]
    """What its value may be: int, float, bool, str, NoneType, or the words of a Literal."""
    default: Any
    """`dataclasses.MISSING` where it has to be given."""

    @property
    def expected(self) -> str:
        """In words, what the value may be."""
        known = [_EXPECTED.get(each, repr(each)) for each in self.types if each is not types.NoneType]
        return " or ".join([*known, NONE] if types.NoneType in self.types else known)

    def __str__(self) -> str:
        if self.default is dataclasses.MISSING:
            return f"{self.key} (required)"
        return f"{self.key}={shown(self.default)}"

    def parse(self, text: str) -> Any:
        """The value that a text stands for."""
        for kind in self.types:
            try:
                return _parse_as(kind, text)
            except ValueError:
                continue
        raise PlanError(f"{self.key} is {text!r}, expected {self.expected}")


def shown(value: Any) -> str:
    """A default as it would be typed after --set."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def settings_of(cls: Any, prefix: str = "") -> Iterator[Setting]:
    """Every setting of a method that can be typed, in the order of its dataclass."""
    hints = get_type_hints(cls)
    for each in dataclasses.fields(cls):
        kinds = _alternatives(hints[each.name])
        nested = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        if nested:
            yield from settings_of(nested[0], f"{prefix}{each.name}.")
            continue
        typed = [kind for kind in kinds if isinstance(kind, str) or kind in _EXPECTED]
        if each.init and typed:
            optional = [types.NoneType] if types.NoneType in kinds else []
            yield Setting(f"{prefix}{each.name}", (*optional, *typed), each.default)


def known_settings(method: str) -> dict[str, Setting]:
    """A method's settings by key. The method of a command that names none has no required ones."""
    known = {setting.key: setting for setting in settings_of(METHODS[method])}
    if method == DEFAULT_METHOD.name:
        for key in ("rank", "latent_bits"):
            known[key] = replace(known[key], default=getattr(DEFAULT_METHOD, key))
    return known


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """A method as options state it."""

    name: str | None = None
    shorthands: Mapping[str, Any] = field(default_factory=dict)
    """Settings with options of their own; None where not given."""
    pairs: Sequence[str] = ()
    """KEY=VALUE."""

    @property
    def given(self) -> bool:
        shorthands = any(value is not None for value in self.shorthands.values())
        return self.name is not None or shorthands or bool(self.pairs)

    def make(self) -> Method | None:
        """The method, or None where no option states one."""
        if not self.given:
            return None
        name = self.name or DEFAULT_METHOD.name
        if name not in METHODS:
            raise unknown_method(name, METHODS)
        settings = self._settings(name)
        if name == DEFAULT_METHOD.name:
            rank = min(DEFAULT_METHOD.rank, settings.get("tile", DEFAULT_METHOD.rank))
            settings = {"rank": rank, "latent_bits": DEFAULT_METHOD.latent_bits, **settings}
        return from_fields(METHODS, {"method": name, **settings})

    def _settings(self, method: str) -> dict[str, Any]:
        known = known_settings(method)
        settings = {key: value for key, value in self.shorthands.items() if value is not None}
        for key in settings:
            _check_known(key, method, known)
        for pair in self.pairs:
            key, value = _split(pair)
            _check_known(key, method, known)
            _put(settings, key, known[key].parse(value))
        return settings


def _split(pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not equals or not key.strip():
        raise PlanError(f"--set is {pair!r}, expected KEY=VALUE, for example bits=4")
    return key.strip(), value.strip()


def _check_known(key: str, method: str, known: Mapping[str, Setting]) -> None:
    if key not in known:
        listed = ", ".join(map(str, known.values()))
        others = [name for name in METHODS if key in known_settings(name)]
        hint = f" ({key} is a setting of {', '.join(others)}: name one with --method)" if others else ""
        raise PlanError(
            f"unknown setting {key!r} for method {method!r}, known are {listed}{hint}",
            found=key,
            allowed=list(known),
        )


def _put(settings: dict[str, Any], key: str, value: Any) -> None:
    """Stores a value under its key, or under `outer` and `inner` where the key is `outer.inner`."""
    outer, dot, inner = key.partition(".")
    into = settings.setdefault(outer, {}) if dot else settings
    if (inner or outer) in into:
        raise PlanError(f"the setting {key!r} is given twice")
    into[inner or outer] = value


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, and the words of a Literal, as one flat tuple."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(kind for member in get_args(hint) for kind in _alternatives(member))
    return get_args(hint) if get_origin(hint) is Literal else (hint,)


def _parse_as(kind: Any, text: str) -> Any:
    if isinstance(kind, str):
        if text != kind:
            raise ValueError(text)
        return kind
    if kind is types.NoneType:
        if text.lower() != NONE:
            raise ValueError(text)
        return None
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise ValueError(text)
        return _BOOLS[text.lower()]
    return kind(text)
