"""What a configuration says and a run does not use, by name: nothing is accepted and silently without effect.

A key that could mislead is refused elsewhere. These are right by themselves, are often the base of a sweep,
and say nothing in the cell at hand.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from policies.config.fleet import Link
from policies.config.hf_config import read_hf_config
from policies.config.runconfig import RunConfig, SamplingSettings
from policies.core.errors import InputError
from policies.core.seam.settings import CacheSettings


def ignored_keys(config: RunConfig, world: Literal["sim", "executor"], has_prefixes: bool) -> tuple[str, ...]:
    """Sentences for a run's notes. `has_prefixes` says whether the workload knows which prompts begin
    alike."""
    found = [f"{key} has no effect: {reason}" for key, reason in _ignored(config, world, has_prefixes)]
    path = Path(config.model)
    if path.is_absolute():
        with suppress(InputError):  # where the folder has moved, the shape is the one that was written down
            found.extend(read_hf_config(path).notes)
    return tuple(found)


def ignored_apart(config: RunConfig, world: str) -> tuple[str, ...]:
    """Sentences for the notes of a fleet whose engines compute prompts or decode, as `RunConfig.parts` makes
    them."""
    if config.fleet is None or config.fleet.link is None:
        return ()
    found, cache, link = [], config.cache, config.fleet.link
    for key in ("gb_per_s", "latency_us") if world == "executor" else ():
        if getattr(link, key) != getattr(Link(), key):
            found.append(f"fleet.link.{key} has no effect: a device's link is as fast as it is")
    if cache.prefix_caching:
        found.append("cache.prefix_caching has no effect on engines that decode: they receive theirs")
    if cache.allocation != "full":
        found.append(
            "cache.allocation and cache.preemption have no effect on engines that compute prompts: their "
            "room is that of prompts alone, from the beginning"
        )
    return tuple(found)


def _ignored(config: RunConfig, world: str, has_prefixes: bool) -> Iterator[tuple[str, str]]:
    cache, exits, sampling = config.cache, config.exit, config.sampling
    for key in ("watermark", "admit"):
        if getattr(cache, key) != getattr(CacheSettings(), key) and cache.allocation == "full":
            yield f"cache.{key}", "allocation full reserves all that a request needs"
    if cache.swap_blocks is not None and cache.preemption != "swap":
        yield "cache.swap_blocks", f"preemption is {cache.preemption}, nothing is swapped"
    if cache.prefix_caching and not has_prefixes:
        yield "cache.prefix_caching", "the workload does not say which prompts begin alike"
    if "shared_prefix" in config.workload and not cache.prefix_caching and world == "sim":
        yield "workload.shared_prefix", "cache.prefix_caching is off"
    if config.workload.get("exit_loops") is not None and exits.mode != "trace":
        yield "workload.exit_loops", f"exit.mode is {exits.mode}"
    never_early = exits.mode == "gate" and exits.threshold == 1
    if exits.loop_weights is not None and (exits.mode != "gate" or never_early or world == "executor"):
        reason = "the executor asks the model's gate" if world == "executor" else "no gate is asked"
        yield "exit.loop_weights", f"{reason}; exit.mode is {exits.mode}, exit.threshold {exits.threshold:g}"
    if exits.threshold != 1 and (exits.mode == "trace" or (exits.mode == "gate" and world == "sim")):
        whose = "the workload's" if exits.mode == "trace" else "drawn by exit.loop_weights"
        yield "exit.threshold", f"loops are {whose}"
    if exits.min_loops != 1 and never_early:
        yield "exit.min_loops", "at threshold 1 no token leaves early"
    if world == "sim" and config.attention != "auto":
        yield "attention", "a latency model is of the kernels that were profiled"
    if world == "sim" and config.workload.get("ignore_eos"):
        yield "workload.ignore_eos", "a simulation samples no token"
    if world == "sim" and sampling != SamplingSettings():
        yield "sampling", "a simulation samples no token"
    if world == "executor" and sampling.temperature == 0 and sampling != SamplingSettings():
        yield "sampling.top_k and top_p", "at temperature 0 the likeliest token is taken"
