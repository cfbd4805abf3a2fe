"""The `fleet` section: several engines behind one router, of one kind or some for prompts and some for the
rest, with links between these."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from policies.config.overrides import absolute
from policies.config.sections import check_keys, named, parse_named, parse_section
from policies.core.bounds import LARGEST, Within
from policies.core.errors import InputError
from policies.core.seam.request import Role
from policies.process.sentences import shown
from policies.routing.registry import ROUTERS
from policies.routing.round_robin import RoundRobin
from policies.routing.router import Router

MOST_REPLICAS = 1024
Count = Annotated[int, Within(1, MOST_REPLICAS)]
Instant = Annotated[float, Within(0, 1e9)]


@dataclass(frozen=True, slots=True)
class Fault:
    """From `from_s` to `until_s` of the run, `link` has `speed` times its bandwidth; at 0 it is broken: what
    is on it is lost, and what comes to it meanwhile."""

    from_s: Instant
    until_s: Instant
    speed: Annotated[float, Within(0, 1)] = 0.0
    link: Annotated[int, Within(0, LARGEST)] = 0


@dataclass(frozen=True, slots=True)
class Link:
    """Links from engines that compute prompts to those that decode: one for each sender, for each pair of a
    sender and a receiver, or one for the whole fleet. Each sends one chunk after another at `gb_per_s`; a
    chunk arrives `latency_us` after it has left."""

    gb_per_s: Annotated[float, Within(gt=0, le=1e6)] = 50.0
    latency_us: Annotated[float, Within(0, 1e9)] = 20.0
    per: Literal["sender", "pair", "fleet"] = "sender"
    faults: tuple[Fault, ...] = ()

    @property
    def latency_ns(self) -> int:
        return round(1e3 * self.latency_us)

    def number(self, prefill: int, decode: int) -> int:
        """How many links there are between so many engines."""
        return {"sender": prefill, "pair": prefill * decode, "fleet": 1}[self.per]

    def between(self, sender: int, receiver: int, decode: int) -> int:
        """The link from a sender to a receiver, of `decode`."""
        return {"sender": sender, "pair": sender * decode + receiver, "fleet": 0}[self.per]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines of one configuration, and who says which of them a request goes to: `replicas` that do the
    whole of it, or `prefill` and `decode` ones with `link` between them. `devices` are theirs, one each,
    those for prompts first; none means that all are the run's `device`."""

    replicas: int
    router: Router
    devices: tuple[str, ...] = ()
    prefill: int = 0
    decode: int = 0
    link: Link | None = None

    @property
    def roles(self) -> list[Role]:
        """What each engine does of its requests."""
        if self.link is None:
            return ["whole"] * self.replicas
        prompts: list[Role] = ["prefill"] * self.prefill
        rest: list[Role] = ["decode"] * self.decode
        return prompts + rest

    def resolved(self) -> dict[str, Any]:
        """The section with all defaults filled in; `devices` only where they are said."""
        devices = {"devices": list(self.devices)} if self.devices else {}
        if self.link is None:
            return {"replicas": self.replicas, "router": named(self.router), **devices}
        link = {**asdict(self.link), "faults": [asdict(item) for item in self.link.faults]}
        return {
            "prefill": self.prefill, "decode": self.decode, "router": named(self.router), "link": link,
            **devices,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Plain:
    replicas: Count | None = None
    devices: tuple[str, ...] = ()
    prefill: Count | None = None
    decode: Count | None = None


def parse_fleet(raw: object, base_dir: Path, where: str) -> Fleet:
    """A checked section; of `replicas` and `devices` one is enough. Raises `InputError`."""
    if not isinstance(raw, Mapping):
        raise InputError(f"{where}: fleet: {shown(raw)}, expected a mapping with replicas or devices")
    check_keys(raw, ("replicas", "router", "devices", "prefill", "decode", "link"), where, "fleet")
    router = parse_named(ROUTERS, raw.get("router", RoundRobin.name), where, "fleet.router")
    keys = {key: raw[key] for key in raw if key not in ("router", "link")}
    plain = parse_section(_Plain, keys, where, "fleet")
    devices = tuple([absolute(name, base_dir) if name.endswith(".json") else name for name in plain.devices])
    apart, number, link = (plain.prefill, plain.decode), plain.replicas, None
    if apart == (None, None):
        if raw.get("link") is not None:
            raise InputError(f"{where}: fleet.link: has no effect without fleet.prefill and fleet.decode")
    elif None in apart or number is not None:
        found = ", ".join(f"{key} {keys[key]}" for key in ("replicas", "prefill", "decode") if key in keys)
        raise InputError(f"{where}: fleet: {found}, expected replicas, or prefill and decode")
    else:
        number = sum([count or 0 for count in apart])
        link = _parse_link(raw.get("link"), apart, where)
    if number is None and not devices:
        raise InputError(f"{where}: fleet: names neither replicas nor devices, expected how many engines")
    if devices and number not in (None, len(devices)):
        raise InputError(
            f"{where}: fleet.devices: {len(devices)} of them for {number} replicas, expected one for each, "
            "or none"
        )
    return Fleet(number or len(devices), router, devices, plain.prefill or 0, plain.decode or 0, link)


def _parse_link(raw: object, apart: tuple[int | None, int | None], where: str) -> Link:
    link = parse_section(Link, raw, where, "fleet.link")
    most = link.number(apart[0] or 0, apart[1] or 0)
    for at, fault in enumerate(link.faults):
        if fault.link >= most:
            raise InputError(f"{where}: fleet.link.faults.{at}.link: {fault.link}, there are {most} links")
        if fault.until_s <= fault.from_s:
            raise InputError(
                f"{where}: fleet.link.faults.{at}.until_s: {fault.until_s}, expected above from_s, "
                f"{fault.from_s}"
            )
    return link
