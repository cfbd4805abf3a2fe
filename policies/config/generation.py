"""What a checkpoint says of generating text: where it ends, and how tokens are drawn by default.

`generation_config.json` beside a model's `config.json`, and of the latter the end-of-sequence ids.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.config.runconfig import SamplingSettings
from policies.core.errors import InputError
from policies.core.models.shape import ModelShape
from policies.process.documents import read_json
from policies.process.sentences import shown

NAME = "generation_config.json"
APPLIED = {"eos_token_id", "do_sample", "temperature", "top_k", "top_p"}
WITHOUT_EFFECT = {"_from_model_config", "bos_token_id", "pad_token_id", "transformers_version", "use_cache"}
"""Bookkeeping, and what only matters to how another library batches."""
MAX_EOS = 256


@dataclass(frozen=True, slots=True)
class Generation:
    """`eos_ids` end an answer; `sampling` is for requests that say nothing, None where no file says it;
    `notes` name what is not applied."""

    eos_ids: tuple[int, ...]
    sampling: SamplingSettings | None = None
    notes: tuple[str, ...] = ()


def read_generation(model: str, shape: ModelShape) -> Generation:
    """What the folder of `model` says; of a shipped name, its shape's end-of-sequence id. Raises
    `InputError`."""
    path = Path(model)
    if not path.is_absolute():
        return Generation((shape.eos_token_id,))
    folder = path if path.is_dir() else path.parent
    config = _object(folder / "config.json") if path.is_dir() else _object(path)
    eos_ids = _eos(path, config.get("eos_token_id"), shape) or (shape.eos_token_id,)
    own = folder / NAME
    if not own.exists():
        return Generation(eos_ids)
    values = _object(own)
    eos_ids = _eos(own, values.get("eos_token_id"), shape) or eos_ids
    others = sorted(key for key in values if key not in APPLIED | WITHOUT_EFFECT and values[key] is not None)
    notes = (f"{NAME}: keys that are not applied: {shown(', '.join(others))[1:-1]}",) if others else ()
    return Generation(eos_ids, _sampling(own, values), notes)


def _object(path: Path) -> dict[str, Any]:
    values = read_json(path, f"a Hugging Face {path.name}", 10_000_000)
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def _eos(path: Path, found: Any, shape: ModelShape) -> tuple[int, ...]:
    """One id or several, none where nothing is said."""
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if len(ids) > MAX_EOS or any(type(item) is not int or not 0 <= item < shape.vocab_size for item in ids):
        raise InputError(
            f"{path}: eos_token_id: {shown(found)}, expected token ids below vocab_size {shape.vocab_size}"
        )
    return tuple(ids)


def _sampling(path: Path, values: dict[str, Any]) -> SamplingSettings | None:
    said = {key: values[key] for key in ("temperature", "top_k", "top_p") if values.get(key) is not None}
    do_sample = values.get("do_sample")
    if do_sample not in (None, True, False):
        raise InputError(f"{path}: do_sample: {shown(do_sample)}, expected true or false")
    if do_sample is False:
        return SamplingSettings()
    if do_sample is None and "temperature" not in said:
        return None
    bounds = {"temperature": (0, 1e6), "top_k": (0, 2**31 - 1), "top_p": (1e-9, 1)}
    for key, value in said.items():
        low, high = bounds[key]
        is_number = isinstance(value, int) or (isinstance(value, float) and key != "top_k")
        if isinstance(value, bool) or not is_number or not low <= value <= high:
            raise InputError(f"{path}: {key}: {shown(value)}, expected a number from {low:g} to {high:g}")
    return SamplingSettings(
        float(said.get("temperature", 1.0)), int(said.get("top_k", 0)), float(said.get("top_p", 1.0))
    )
