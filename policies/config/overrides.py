"""A configuration before it is checked: a mapping from a YAML file, and `--set a.b=c` put into it."""

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policies.core.errors import InputError
from policies.process.documents import MAX_CONFIG_BYTES, parse_scalar, parse_yaml, read_text
from policies.process.sentences import shown

MAX_LEVELS = 8


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `InputError` for a missing, unreadable or non-mapping file."""
    text = read_text(path, "a YAML configuration", MAX_CONFIG_BYTES)
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise InputError(
            f"{path}: expected a mapping with keys like model, policy and workload, found "
            f"{type(data).__name__}"
        )
    return data


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`raw` with every `a.b=c` set; `policy=wcpb` is short for `policy.name=wcpb` with no options."""
    result = copy.deepcopy(dict(raw))
    for override in overrides:
        set_key(result, *split_override(override))
    return result


def split_override(override: str) -> tuple[str, Any]:
    """`a.b=c` as a dotted key and a YAML value: a plain one is taken whole, with any `#` and `:` in it.
    Raises `InputError`."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")) or key.count(".") >= MAX_LEVELS:
        raise InputError(
            f"--set {shown(override)[1:-1]}: expected KEY=VALUE, like scheduler.prefill_chunk_size=32"
        )
    return key, parse_scalar(text, f"--set {shown(override)[1:-1]}")


def set_key(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted `key` in nested mappings, making those on the way. Another `model` has another shape.
    Raises `InputError` where something else than a mapping is on the way."""
    *path, last = key.split(".")
    node = raw
    for part in path:
        if part in ("policy", "router") and isinstance(node.get(part), str):
            node[part] = {"name": node[part]}
        elif node.get(part) is None:
            node[part] = {}
        if not isinstance(node[part], dict):
            raise InputError(f"{key}: {part} is {shown(node[part])}, expected a mapping to set {last} in")
        node = node[part]
    node[last] = value
    if key == "model":
        raw.pop("model_shape", None)


def locate(name: str, base_dir: Path) -> Path:
    """A relative path is looked up beside the config file first, then in the current directory; `~` is the
    user's home."""
    name = os.path.expanduser(name)
    beside = base_dir / name
    return beside if os.path.exists(beside) or not os.path.exists(name) else Path(name)


def absolute(name: str, base_dir: Path) -> str:
    """Where `name` lies, whole and without links. A pipe keeps its name, for its reader to refuse."""
    path = locate(name, base_dir)
    try:
        real = os.path.realpath(path)
    except (OSError, ValueError):
        return str(path)
    return real if os.path.exists(real) or not os.path.exists(path) else os.path.abspath(path)
