"""A run's configuration: read from YAML, overridden from the command line, checked whole before anything
starts.

Turns text into values (`RunConfig`) and every mistake into one `InputError` naming the file, the key and what
was expected. The `workload` section is handed through as it is: `workloads` knows it.
"""

import copy
import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from policies.core.errors import InputError
from policies.core.models.hf_config import shape_from_hf_config
from policies.core.models.shape import SHIPPED_MODELS, ModelShape
from policies.core.seam.exits import ExitSettings
from policies.core.seam.policy import Policy
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.process.sentences import first_problem, nearest
from policies.registry import POLICIES

T = TypeVar("T")
LARGEST = 100_000_000
"""Above any pool or budget that a device could have: a larger number is a typing mistake."""
MAX_INFLIGHT = 8
"""Two decode steps of PRELUDE, RECURRENT and CODA and some; beyond it a deeper queue only makes decisions
older."""
SECTIONS = ("model", "device", "policy", "scheduler", "cache", "exit", "workload", "sampling", "seed")


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How the executor turns logits into a token: greedy at temperature 0. `top_k` 0 and `top_p` 1 keep every
    token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A checked configuration. `resolved` is the same as a plain mapping with all defaults filled in:
    `config.yaml` of a run."""

    model: str
    device: str
    policy: Policy
    scheduler: SchedulerSettings
    cache: CacheSettings
    exit: ExitSettings
    workload: Mapping[str, Any]
    sampling: SamplingSettings
    seed: int
    base_dir: Path
    where: str
    resolved: Mapping[str, Any] = field(repr=False)

    def with_blocks(self, num_blocks: int) -> "RunConfig":
        """The same with the KV pool's size filled in."""
        cache = dataclasses.replace(self.cache, num_blocks=num_blocks)
        resolved = {**self.resolved, "cache": dataclasses.asdict(cache)}
        return dataclasses.replace(self, cache=cache, resolved=resolved)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path` and apply `a.b=c` overrides (values are YAML). Raises `InputError`."""
    return parse_config(apply_overrides(read_yaml(path), overrides), path.parent, str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `InputError` for a missing, unreadable or non-mapping file."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file, expected a YAML configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text ({error})") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply, expected a configuration of a few levels") from None
    if not isinstance(data, dict):
        raise InputError(
            f"{path}: expected a mapping with keys like {', '.join(SECTIONS)}, found {type(data).__name__}"
        )
    return data


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`raw` with every `a.b=c` set; `policy=wcpb` is short for `policy.name=wcpb` with no options."""
    result = copy.deepcopy(dict(raw))
    for override in overrides:
        set_key(result, *split_override(override))
    return result


def split_override(override: str) -> tuple[str, Any]:
    """`a.b=c` as a dotted key and a YAML value. Raises `InputError`."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {override}: expected KEY=VALUE, like scheduler.prefill_chunk_size=32")
    try:
        return key.strip(), yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"--set {override}: the value is not valid YAML") from None


def set_key(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted `key` in nested mappings, making those on the way."""
    *path, last = key.split(".")
    node = raw
    for part in path:
        if not isinstance(node.get(part), dict):
            node[part] = {"name": node[part]} if part == "policy" and isinstance(node.get(part), str) else {}
        node = node[part]
    node[last] = value


def parse_config(raw: Mapping[str, Any], base_dir: Path, where: str) -> RunConfig:
    """Check a whole mapping. `where` names it in errors; relative paths in it are relative to `base_dir`."""
    check_keys(raw, SECTIONS, where)
    model = _text(raw.get("model", "ouro-1.4b"), where, "model")
    device = _text(raw.get("device", "h200"), where, "device")
    if device.endswith(".json"):
        device = str(locate(device, base_dir).resolve())
    policy = parse_policy(raw.get("policy", "wcpb"), where)
    scheduler = parse_section(SchedulerSettings, raw.get("scheduler"), where, "scheduler")
    cache = parse_section(CacheSettings, _spell_off(raw.get("cache"), "preemption"), where, "cache")
    if cache.layout == "shared" and "prefill_chunk_size" not in (raw.get("scheduler") or {}):
        scheduler = dataclasses.replace(scheduler, prefill_chunk_size=1)
    exit_settings = parse_section(ExitSettings, raw.get("exit"), where, "exit")
    sampling = parse_section(SamplingSettings, raw.get("sampling"), where, "sampling")
    if not 0 <= sampling.temperature < math.inf or sampling.top_k < 0 or not 0 < sampling.top_p <= 1:
        raise InputError(
            f"{where}: sampling: {sampling}, expected temperature >= 0, top_k >= 0 and 0 < top_p <= 1"
        )
    _check_scheduler(scheduler, where)
    _check_cache(cache, where)
    seed = raw.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise InputError(f"{where}: seed: {seed!r}, expected a whole number >= 0")
    workload = raw.get("workload")
    if not isinstance(workload, Mapping):
        raise InputError(
            f"{where}: workload: expected a mapping with kind: trace, synthetic or preset, found {workload!r}"
        )
    workload = dict(workload)
    for key in ("path", "dataset"):
        if isinstance(workload.get(key), str):
            workload[key] = str(locate(workload[key], base_dir).resolve())
    if model not in SHIPPED_MODELS and locate(model, base_dir).exists():
        model = str(locate(model, base_dir).resolve())
    resolved = {
        "model": model,
        "device": device,
        "policy": {"name": policy.name, **dataclasses.asdict(policy)},  # type: ignore[call-overload]
        "scheduler": dataclasses.asdict(scheduler),
        "cache": dataclasses.asdict(cache),
        "exit": dataclasses.asdict(exit_settings),
        "workload": copy.deepcopy(workload),
        "sampling": dataclasses.asdict(sampling),
        "seed": seed,
    }
    return RunConfig(
        model,
        device,
        policy,
        scheduler,
        cache,
        exit_settings,
        workload,
        sampling,
        seed,
        base_dir,
        where,
        resolved,
    )


def parse_policy(raw: object, where: str) -> Policy:
    """A policy from its name, or from a mapping with `name` and its options."""
    if isinstance(raw, str):
        raw = {"name": raw}
    if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str):
        raise InputError(
            f"{where}: policy: {raw!r}, expected a name or a mapping with name: {', '.join(POLICIES)}"
        )
    name = raw["name"]
    if name not in POLICIES:
        raise InputError(f"{where}: policy.name: unknown policy {name!r}{nearest(name, POLICIES)}")
    options = {key: value for key, value in raw.items() if key != "name"}
    return parse_section(POLICIES[name], options, where, "policy")


def parse_section(kind: type[T], raw: object, where: str, section: str) -> T:
    """An instance of the dataclass `kind` from a mapping; unknown keys, wrong types and NaN are refused."""
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise InputError(f"{where}: {section}: {raw!r}, expected a mapping")
    names = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    check_keys(raw, names, where, section)
    try:
        text = json.dumps(dict(raw), default=str)
    except (ValueError, RecursionError):
        raise InputError(
            f"{where}: {section}: refers to itself or is nested too deeply, expected plain values"
        ) from None
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise InputError(f"{where}: {first_problem(error, section)}") from None


def check_keys(raw: Mapping[str, Any], known: Sequence[str], where: str, section: str = "") -> None:
    """Raise `InputError` for the first key that is not known, with the nearest one that is."""
    for key in raw:
        if key not in known:
            name = f"{section}.{key}" if section else str(key)
            raise InputError(f"{where}: unknown key {name!r}{nearest(str(key), known)}")


def model_shape(config: RunConfig) -> ModelShape:
    """The shape that `model` names: a shipped one, or a Hugging Face `config.json` or checkpoint folder.
    Raises `InputError`."""
    shipped = SHIPPED_MODELS.get(config.model)
    if shipped is not None:
        return shipped
    path = locate(config.model, config.base_dir)
    if not path.exists():
        known = nearest(config.model, SHIPPED_MODELS)
        raise InputError(
            f"model: unknown model {config.model!r}{known} or the path of a Hugging Face config.json"
        )
    return shape_from_hf_config(path)


def input_sha256(config: RunConfig) -> str:
    """A hash of the files that the workload is read from. Raises `InputError`."""
    digest = hashlib.sha256()
    for key in ("path", "dataset"):
        name = config.resolved["workload"].get(key)
        if isinstance(name, str):
            try:
                with open(name, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise InputError(
                    f"{config.where}: workload.{key}: {name}: {error.strerror or error}"
                ) from None
    return digest.hexdigest()


def locate(name: str, base_dir: Path) -> Path:
    """A relative path is looked up beside the config file first, then in the current directory."""
    beside = base_dir / name
    try:
        return beside if beside.exists() or not Path(name).exists() else Path(name)
    except OSError:
        return beside


def _spell_off(raw: object, key: str) -> object:
    """YAML 1.1 reads an unquoted `off` as False; put the word back."""
    return {**raw, key: "off"} if isinstance(raw, Mapping) and raw.get(key) is False else raw


def _text(value: object, where: str, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: {key}: {value!r}, expected a name or a path")
    return value


def _check_scheduler(scheduler: SchedulerSettings, where: str) -> None:
    if max(scheduler.max_num_seqs, scheduler.max_num_batched_tokens) > LARGEST:
        raise InputError(
            f"{where}: scheduler.max_num_seqs and max_num_batched_tokens: expected at most {LARGEST}"
        )
    positive = (
        "max_num_seqs",
        "max_num_batched_tokens",
        "admission_scan_limit",
        "max_prefill_batches_before_decode",
    )
    for name in (*positive, "min_coda_batch_size"):
        _at_least(getattr(scheduler, name), 1, where, f"scheduler.{name}")
    if not 1 <= scheduler.inflight <= MAX_INFLIGHT:
        raise InputError(f"{where}: scheduler.inflight: {scheduler.inflight}, expected 1 to {MAX_INFLIGHT}")
    _at_least(scheduler.max_admission_bypasses, 0, where, "scheduler.max_admission_bypasses")
    if scheduler.prefill_chunk_size is not None:
        _at_least(scheduler.prefill_chunk_size, 1, where, "scheduler.prefill_chunk_size")
        if scheduler.prefill_chunk_size > scheduler.max_num_batched_tokens:
            raise InputError(
                f"{where}: scheduler.prefill_chunk_size: {scheduler.prefill_chunk_size} is larger than the "
                f"batch budget max_num_batched_tokens, {scheduler.max_num_batched_tokens}"
            )


def _check_cache(cache: CacheSettings, where: str) -> None:
    _at_least(cache.block_size, 1, where, "cache.block_size")
    if cache.num_blocks is not None:
        _at_least(cache.num_blocks, 1, where, "cache.num_blocks")
        if cache.num_blocks > LARGEST:
            raise InputError(f"{where}: cache.num_blocks: {cache.num_blocks}, expected at most {LARGEST}")
    if not 0 <= cache.watermark < 1:
        raise InputError(
            f"{where}: cache.watermark: {cache.watermark}, expected a fraction of the pool, at least 0 and "
            "below 1"
        )
    if cache.swap_blocks is not None:
        _at_least(cache.swap_blocks, 0, where, "cache.swap_blocks")


def _at_least(value: int, least: int, where: str, key: str) -> None:
    if value < least:
        raise InputError(f"{where}: {key}: {value}, expected at least {least}")
