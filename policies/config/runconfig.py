"""A run's configuration: read from YAML, overridden from the command line, checked whole before anything
starts.

Turns text into values (`RunConfig`) and every mistake into one `InputError` naming the file, the key and what
was expected. What a single key may hold stands where the key is declared; which keys do not go together, in
`check_together`. The `workload` section is handed through as it is: `workloads` knows it.
"""

import copy
import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from policies.config.fleet import Fleet, parse_fleet
from policies.config.hf_config import read_hf_config, shape_from_hf_config
from policies.config.overrides import absolute, apply_overrides, locate, read_yaml
from policies.config.sections import check_keys, named, parse_named, parse_section
from policies.core.bounds import LARGEST, Within
from policies.core.errors import InputError
from policies.core.models.shape import HUB_MODELS, SHIPPED_MODELS, ModelShape
from policies.core.seam.exits import ExitRule, ExitSettings
from policies.core.seam.guesses import NO_GUESSES, SpeculationSettings
from policies.core.seam.objectives import EVERYTHING, LATENCIES, Objectives, Window
from policies.core.seam.policy import Policy
from policies.core.seam.request import Role
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.costs.transfer import PREFIX, parts_of, transfer_name
from policies.process.documents import LARGEST_INT, open_regular
from policies.process.sentences import nearest, shown
from policies.registry import POLICIES


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How the executor turns logits into a token: greedy at temperature 0. `top_k` 0 and `top_p` 1 keep every
    token."""

    temperature: Annotated[float, Within(0, 1e6)] = 0.0
    top_k: Annotated[int, Within(0, LARGEST)] = 0
    top_p: Annotated[float, Within(gt=0, le=1)] = 1.0


@dataclass(frozen=True, slots=True)
class _Plain:
    """The keys that hold one value."""

    model: str = "ouro-1.4b"
    device: str = "h200"
    attention: Literal["auto", "cuda", "triton"] = "auto"
    seed: Annotated[int, Within(0, LARGEST_INT)] = 0
    role: Role = "whole"


WORKLOAD_FILES = ("path", "dataset", "tokenizer")
"""Keys of a workload that name files."""
SECTIONS = (
    "model", "device", "policy", "scheduler", "cache", "exit", "speculation", "workload", "sampling", "seed",
    "slo", "measure", "model_shape", "fleet", "role", "attention",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A checked configuration. `resolved` is the same as a plain mapping with all defaults filled in:
    `config.yaml` of a run.

    `model_shape` is that of a model with another name than a shipped one, None where it is not known (yet):
    a run writes it down, so that its directory can be replayed where the model's folder is not.
    """

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
    slo: Objectives | None = None
    measure: Window = EVERYTHING
    model_shape: ModelShape | None = None
    fleet: Fleet | None = None
    role: Role = "whole"
    attention: Literal["auto", "cuda", "triton"] = "auto"
    speculation: SpeculationSettings = NO_GUESSES

    def parts(self) -> list["RunConfig"]:
        """What each engine of a fleet runs: the same without `fleet`, on its own device. Without one, the
        only engine's is this."""
        if self.fleet is None:
            return [self]
        devices = self.fleet.devices or [self.device] * self.fleet.replicas
        return [self._part(role, device) for role, device in zip(self.fleet.roles, devices, strict=True)]

    def _part(self, role: Role, device: str) -> "RunConfig":
        """One engine's. Who computes prompts alone needs room for these alone, and has it from the beginning;
        who receives them has prefixes of its own of no use."""
        cache = self.cache
        if role == "prefill":
            cache = dataclasses.replace(cache, allocation="full", preemption="off")
        elif role == "decode":
            cache = dataclasses.replace(cache, prefix_caching=False)
        resolved = {key: value for key, value in self.resolved.items() if key != "fleet"}
        resolved |= {"device": device, "cache": dataclasses.asdict(cache)}
        if role != "whole":
            resolved["role"] = role
        return dataclasses.replace(self, fleet=None, device=device, role=role, cache=cache, resolved=resolved)

    def rule(self, model: ModelShape) -> ExitRule:
        """Where decoded tokens of `model` may leave, or are guessed. Raises `InputError` for what does not go
        together."""
        return self.speculation.rule(self.exit, model, self.policy, self.cache)

    def with_blocks(self, num_blocks: int) -> "RunConfig":
        """The same with the KV pool's size filled in."""
        cache = dataclasses.replace(self.cache, num_blocks=num_blocks)
        resolved = {**self.resolved, "cache": dataclasses.asdict(cache)}
        return dataclasses.replace(self, cache=cache, resolved=resolved)

    def with_shape(self, shape: ModelShape) -> "RunConfig":
        """The same with the model's shape written down, unless its name says it or it is already."""
        if self.model in SHIPPED_MODELS or self.model_shape is not None:
            return self
        resolved = {**self.resolved, "model_shape": dataclasses.asdict(shape)}
        return dataclasses.replace(self, model_shape=shape, resolved=resolved)


def load_config(
    path: Path, overrides: Sequence[str] = (), workload: Mapping[str, Any] | None = None
) -> RunConfig:
    """Read `path` and apply `a.b=c` overrides (values are YAML). `workload` is for a file that has none.
    Raises `InputError`."""
    raw = apply_overrides(read_yaml(path), overrides)
    if workload is not None:
        raw.setdefault("workload", dict(workload))
    return parse_config(raw, path.parent, str(path))


def parse_config(raw: Mapping[str, Any], base_dir: Path, where: str) -> RunConfig:
    """Check a whole mapping. `where` names it in errors; relative paths in it are relative to `base_dir`."""
    check_keys(raw, SECTIONS, where)
    raw = {**raw, **({"device": _device(raw["device"], base_dir, where)} if "device" in raw else {})}
    plain = parse_section(
        _Plain,
        {key: raw[key] for key in ("model", "device", "attention", "seed", "role") if key in raw},
        where,
        "",
    )
    model, device = plain.model, plain.device
    policy = parse_named(POLICIES, raw.get("policy", "wcpb"), where, "policy")
    fleet = None if raw.get("fleet") is None else parse_fleet(raw["fleet"], base_dir, where)
    scheduler = parse_section(SchedulerSettings, raw.get("scheduler"), where, "scheduler")
    cache = parse_section(CacheSettings, _spell_off(raw.get("cache"), "preemption"), where, "cache")
    if cache.layout == "shared" and "prefill_chunk_size" not in (raw.get("scheduler") or {}):
        scheduler = dataclasses.replace(scheduler, prefill_chunk_size=1)
    exit_settings = parse_section(ExitSettings, raw.get("exit"), where, "exit")
    speculation = parse_section(
        SpeculationSettings, _spell_off(raw.get("speculation"), "mode"), where, "speculation"
    )
    sampling = parse_section(SamplingSettings, raw.get("sampling"), where, "sampling")
    slo = parse_objectives(raw["slo"], where) if raw.get("slo") is not None else None
    measure = parse_section(Window, raw.get("measure"), where, "measure")
    workload = raw.get("workload")
    if not isinstance(workload, Mapping):
        raise InputError(
            f"{where}: workload: expected a mapping with kind: trace, synthetic, preset, prompts or live, "
            f"found {shown(workload)}"
        )
    workload = dict(workload)
    for key in WORKLOAD_FILES:
        if isinstance(workload.get(key), str):
            workload[key] = absolute(workload[key], base_dir)
            if key == "tokenizer" and os.path.isdir(workload[key]):
                workload[key] = os.path.join(workload[key], "tokenizer.json")
    if workload.get("kind") == "prompts" and workload.get("tokenizer") is None:
        own = os.path.join(absolute(model, base_dir), "tokenizer.json")
        if model not in SHIPPED_MODELS and os.path.isfile(own):
            workload["tokenizer"] = own
    shape = None
    if raw.get("model_shape") is not None:
        shape = parse_section(ModelShape, raw["model_shape"], where, "model_shape")
    path = locate(model, base_dir)
    has_path = model not in SHIPPED_MODELS and os.path.exists(path)
    if has_path:
        model = absolute(model, base_dir)
    check_together(model, shape, scheduler, where)
    if fleet is not None and fleet.link is not None:
        check_apart(cache, speculation, where)
    config = RunConfig(
        model,
        device,
        policy,
        scheduler,
        cache,
        exit_settings,
        workload,
        sampling,
        plain.seed,
        base_dir,
        where,
        {
            "model": model,
            "device": device,
            "policy": named(policy),
            "scheduler": dataclasses.asdict(scheduler),
            "cache": dataclasses.asdict(cache),
            "exit": dataclasses.asdict(exit_settings),
            "workload": copy.deepcopy(workload),
            "sampling": dataclasses.asdict(sampling),
            "seed": plain.seed,
            # Only where something is said: runs that were recorded before keep their hashes.
            **({"slo": {**slo.limits_ms, "share": slo.share}} if slo else {}),
            **({"measure": dataclasses.asdict(measure)} if measure != EVERYTHING else {}),
            **({"fleet": fleet.resolved()} if fleet else {}),
            **({"role": plain.role} if plain.role != "whole" else {}),
            **({"attention": plain.attention} if plain.attention != "auto" else {}),
            **({"speculation": spoken(speculation)} if speculation != NO_GUESSES else {}),
        },
        slo,
        measure,
        fleet=fleet,
        role=plain.role,
        attention=plain.attention,
        speculation=speculation,
    )
    if has_path and raw.get("exit") is None:
        threshold = read_hf_config(Path(model)).exit_threshold
        if threshold != 1:
            raise InputError(
                f"{where}: exit: is not said, and the model's config.json has early_exit_threshold "
                f"{threshold:g}; expected exit: {{mode: gate, threshold: {threshold:g}}} or "
                "exit: {mode: fixed}"
            )
    shape = shape or HUB_MODELS.get(model) or (shape_from_hf_config(Path(model)) if has_path else None)
    return config if shape is None else config.with_shape(shape)


def spoken(speculation: SpeculationSettings) -> dict[str, Any]:
    """A `speculation` section as YAML has it."""
    found = dataclasses.asdict(speculation)
    if isinstance(speculation.acceptance, tuple):
        found["acceptance"] = list(speculation.acceptance)
    return found


def check_together(model: str, shape: ModelShape | None, scheduler: SchedulerSettings, where: str) -> None:
    """Raise `InputError` where keys that are right by themselves contradict each other. What a policy, a
    model and a cache cannot do together is `Policy.check`'s; exits and loops, `ExitSettings.rule`'s."""
    if scheduler.chunk_tokens > scheduler.max_num_batched_tokens:
        raise InputError(
            f"{where}: scheduler.prefill_chunk_size: {scheduler.chunk_tokens} is larger than the batch "
            f"budget max_num_batched_tokens, {scheduler.max_num_batched_tokens}"
        )
    path = Path(model)
    called = path.parent.name if path.suffix == ".json" else path.name
    known = SHIPPED_MODELS.get(model)
    if shape is not None and model not in HUB_MODELS and (shape != known if known else shape.name != called):
        raise InputError(
            f"{where}: model_shape: is that of {shown(shape.name)}, not of model {shown(model)}; a run "
            "writes it, leave it out for another model"
        )


def check_apart(cache: CacheSettings, speculation: SpeculationSettings, where: str) -> None:
    """Raise `InputError` where settings cannot be those of a fleet whose prompts are computed by others."""
    if speculation != NO_GUESSES:
        raise InputError(
            f"{where}: speculation: cannot run with fleet.decode, where a request begins at the LM head with "
            "no guess behind it; expected off"
        )
    if cache.preemption == "swap":
        raise InputError(
            f"{where}: cache.preemption: swap cannot run with fleet.decode: room that a request left for "
            "host memory may be written to before it has gone; expected recompute or off"
        )
    if cache.allocation == "incremental" and cache.admit == "first_chunk":
        raise InputError(
            f"{where}: cache.admit: first_chunk cannot run with fleet.decode, which reserves room for the "
            "whole prompt; expected whole_context"
        )


def parse_objectives(raw: object, where: str) -> Objectives:
    """The objectives of a `slo` section, at least one."""
    slo = parse_section(Objectives, raw, where, "slo")
    if not slo.limits_ms:
        raise InputError(f"{where}: slo: names no objective, expected {', '.join(LATENCIES[:-1])} or e2e_ms")
    return slo


def model_shape(config: RunConfig) -> ModelShape:
    """The shape that `model` names: a shipped one, a published checkpoint, a Hugging Face `config.json` or
    checkpoint folder, or what a run has written down. Raises `InputError`."""
    shape = SHIPPED_MODELS.get(config.model) or config.model_shape
    if shape is None:
        known = nearest(config.model, SHIPPED_MODELS, HUB_MODELS)
        raise InputError(
            f"model: unknown model {shown(config.model)}{known} or {', '.join(HUB_MODELS)} or the path of a "
            "Hugging Face config.json"
        )
    return shape


def input_sha256(config: RunConfig) -> str:
    """A hash of the files that the workload is read from. Raises `InputError`."""
    digest = hashlib.sha256()
    for key in WORKLOAD_FILES:
        name = config.resolved["workload"].get(key)
        if isinstance(name, str):
            try:
                with open_regular(Path(name), "a trace") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise InputError(
                    f"{config.where}: workload.{key}: {name}: {error.strerror or error}"
                ) from None
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A known device scaled to a card that nobody has profiled (`policies.costs.transfer`)."""

    like: str
    card: str


def _device(raw: object, base_dir: Path, where: str) -> object:
    """A device as one name: a mapping is called what it means, the path of a model file made absolute."""
    if isinstance(raw, Mapping):
        transfer = parse_section(_Transfer, raw, where, "device")
        return transfer_name(str(_device(transfer.like, base_dir, where)), transfer.card)
    if isinstance(raw, str) and raw.startswith(PREFIX):
        like, card = parts_of(raw)
        return transfer_name(str(_device(like, base_dir, where)), card)
    return absolute(raw, base_dir) if isinstance(raw, str) and raw.endswith(".json") else raw


def _spell_off(raw: object, key: str) -> object:
    """YAML 1.1 reads an unquoted `off` as False; put the word back (`grid` does so for what axes are
    called)."""
    return {**raw, key: "off"} if isinstance(raw, Mapping) and raw.get(key) is False else raw
