"""One section of a configuration: a mapping turned into a dataclass, or into one of several that it names."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from policies.core.errors import InputError
from policies.process.sentences import first_problem, nearest, shown

T = TypeVar("T")


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}
"""Made once: pydantic loses a Ctrl-C that comes while it builds a validator, or takes it for a fault of the
schema."""


def adapter_of(kind: type[T]) -> TypeAdapter[T]:
    """What reads a `kind` and checks it."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def parse_section(kind: type[T], raw: object, where: str, section: str) -> T:
    """An instance of the dataclass `kind` from a mapping; unknown keys, wrong types, numbers out of range and
    NaN are refused."""
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise InputError(f"{where}: {section}: {shown(raw)}, expected a mapping")
    check_keys(raw, [item.name for item in dataclasses.fields(kind)], where, section)  # type: ignore[arg-type]
    try:
        return adapter_of(kind).validate_json(json.dumps(dict(raw)), strict=True)
    except ValidationError as error:
        raise InputError(f"{where}: {first_problem(error, section)}") from None
    except (TypeError, ValueError, RecursionError):
        raise InputError(f"{where}: {section}: {shown(raw)}, expected plain values") from None


def check_keys(raw: Mapping[str, Any], known: Sequence[str], where: str, section: str = "") -> None:
    """Raise `InputError` for the first key that is not known, with the nearest one that is."""
    for key in raw:
        if key not in known:
            name = f"{section}.{key}" if section else str(key)
            raise InputError(f"{where}: unknown key {shown(name)}{nearest(str(key), known)}")


def parse_named(menu: Mapping[str, type[T]], raw: object, where: str, section: str) -> T:
    """One of `menu` from its name, or from a mapping with `name` and its options."""
    what = section.rpartition(".")[2]
    if isinstance(raw, str):
        raw = {"name": raw}
    if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str):
        raise InputError(
            f"{where}: {section}: {shown(raw)}, expected a name or a mapping with name: {', '.join(menu)}"
        )
    name = raw["name"]
    if name not in menu:
        raise InputError(f"{where}: {section}.name: unknown {what} {shown(name)}{nearest(name, menu)}")
    options = {key: value for key, value in raw.items() if key != "name"}
    return parse_section(menu[name], options, where, section)


def named(value: Any) -> dict[str, Any]:
    """What `parse_named` takes for `value`, every option filled in."""
    return {"name": value.name, **dataclasses.asdict(value)}
