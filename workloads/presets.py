"""The workloads that ship with the project, as YAML beside this file.

A preset is a synthetic workload with a name, a description and notes for the user. What its source published
is there as documentation: nothing but `workload` is applied, and run settings such as `max_num_seqs` stay the
user's.
"""

from pathlib import Path
from typing import Any

import yaml

from policies.core.errors import InputError
from policies.process.sentences import nearest, shown
from workloads.columns import Columns
from workloads.spec import PresetSpec, SyntheticSpec, parse_synthetic
from workloads.synthetic import generate

PRESET_DIR = Path(__file__).parent / "presets"
_OVERRIDES = (
    "num_requests", "arrival", "prompt_tokens", "output_tokens", "shared_prefix", "exit_loops", "max_tokens",
    "max_context", "patience_ms",
)  # fmt: skip


def preset_names() -> list[str]:
    """Names of all shipped presets, sorted."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.yaml"))


def read_preset(name: str) -> dict[str, Any]:
    """The content of a preset: `description`, `notes`, `workload`, perhaps `published`. Raises `InputError`
    for an unknown name."""
    names = preset_names()
    if name not in names:
        raise InputError(f"workload.name: unknown preset {shown(name)}{nearest(name, names)}")
    data: dict[str, Any] = yaml.safe_load((PRESET_DIR / f"{name}.yaml").read_text(encoding="utf-8"))
    return data


def resolve_preset(spec: PresetSpec) -> SyntheticSpec:
    """The synthetic workload that a preset and the keys given with it amount to.

    Raises `InputError` for an unknown preset and for `rate` where the arrival process has none.
    """
    body = dict(read_preset(spec.name)["workload"])
    body.update({key: value for key in _OVERRIDES if (value := getattr(spec, key)) is not None})
    resolved = parse_synthetic(body, f"preset {spec.name}")
    inner = {key: value for key in ("rate", "concurrency") if (value := getattr(spec, key)) is not None}
    if not inner:
        return resolved
    if "rate" in inner and "rate" not in type(resolved.arrival).model_fields:
        raise InputError(
            f"workload.rate: {spec.rate}, expected none: the {resolved.arrival.process} arrivals of "
            f"{spec.name} have no rate"
        )
    return resolved.model_copy(update={"arrival": resolved.arrival.model_copy(update=inner)})


def generate_preset(spec: PresetSpec, seed: int) -> Columns:
    """The columns of a preset's requests, its notes, and a note of what was overridden. Raises
    `InputError`."""
    columns = generate(resolve_preset(spec), seed, spec.name)
    columns.notes.extend(read_preset(spec.name).get("notes", ()))
    changed = [key for key in (*_OVERRIDES, "rate", "concurrency") if getattr(spec, key) is not None]
    if changed:
        columns.notes.append(f"preset {spec.name} with its own {', '.join(changed)} replaced")
    return columns
