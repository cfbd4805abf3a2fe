"""The `fleet` section: several engines behind one router."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from policies.config.overrides import absolute
from policies.config.sections import check_keys, named, parse_named, parse_section
from policies.core.bounds import Within
from policies.core.errors import InputError
from policies.process.sentences import shown
from policies.routing.registry import ROUTERS
from policies.routing.round_robin import RoundRobin
from policies.routing.router import Router

MOST_REPLICAS = 1024


@dataclass(frozen=True, slots=True)
class Fleet:
    """`replicas` engines of one configuration, and who says which of them a request goes to. `devices` are
    theirs, one each; none means that all are the run's `device`."""

    replicas: int
    router: Router
    devices: tuple[str, ...] = ()

    def resolved(self) -> dict[str, Any]:
        """The section with all defaults filled in; `devices` only where they are said."""
        devices = {"devices": list(self.devices)} if self.devices else {}
        return {"replicas": self.replicas, "router": named(self.router), **devices}


@dataclass(frozen=True, slots=True)
class _Plain:
    replicas: Annotated[int, Within(1, MOST_REPLICAS)] | None = None
    devices: tuple[str, ...] = ()


def parse_fleet(raw: object, base_dir: Path, where: str) -> Fleet:
    """A checked section; of `replicas` and `devices` one is enough. Raises `InputError`."""
    if not isinstance(raw, Mapping):
        raise InputError(f"{where}: fleet: {shown(raw)}, expected a mapping with replicas or devices")
    check_keys(raw, ("replicas", "router", "devices"), where, "fleet")
    router = parse_named(ROUTERS, raw.get("router", RoundRobin.name), where, "fleet.router")
    plain = parse_section(_Plain, {key: raw[key] for key in raw if key != "router"}, where, "fleet")
    devices = tuple([absolute(name, base_dir) if name.endswith(".json") else name for name in plain.devices])
    if plain.replicas is None and not devices:
        raise InputError(f"{where}: fleet: names neither replicas nor devices, expected how many engines")
    if devices and plain.replicas not in (None, len(devices)):
        raise InputError(
            f"{where}: fleet.devices: {len(devices)} of them for {plain.replicas} replicas, expected one for "
            "each, or none"
        )
    return Fleet(plain.replicas or len(devices), router, devices)
