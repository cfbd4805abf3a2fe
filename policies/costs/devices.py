"""The catalogue of device ceilings in `devices.yaml`. How long a device takes for a batch is a latency
model's business."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from policies.core.errors import InputError
from policies.costs.limit import DeviceFacts
from policies.process.sentences import nearest, shown

CATALOGUE = Path(__file__).with_name("devices.yaml")


@cache
def _entries() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = yaml.safe_load(CATALOGUE.read_text(encoding="utf-8"))
    return entries


def device_names() -> list[str]:
    """The names of the devices in the catalogue."""
    return list(_entries())


def device_facts(name: str) -> DeviceFacts:
    """The ceilings of the device called `name` in the catalogue. Raises `InputError` listing the names there
    are."""
    entry = _entries().get(name)
    if entry is None:
        raise InputError(f"device: unknown card {shown(name)}{nearest(name, _entries())}")
    return DeviceFacts(
        name,
        1e12 * entry["bandwidth_tb_per_s"],
        1e12 * entry["peak_tflop_per_s"],
        int(1e9 * entry["memory_gb"]),
        entry["source"],
        1e9 * entry["host_gb_per_s"],
    )


def datasheet_of(name: str) -> DeviceFacts:
    """What the datasheet says of the device called `name`: of a measured entry, the entry that it names."""
    facts = device_facts(name)
    sheet = _entries()[name].get("datasheet")
    return facts if sheet is None else device_facts(sheet)


def facts_of_card(torch_name: str) -> DeviceFacts | None:
    """The ceilings of the card that the driver calls `torch_name`, or None when the catalogue does not know
    it."""
    for name, entry in _entries().items():
        if entry.get("torch_name") == torch_name:
            return device_facts(name)
    return None
