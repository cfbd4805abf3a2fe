"""What a run was: the names that tell it from other runs, read off its resolved config. Knows nothing of what
the run did."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

POLICY_ORDER = ("atomic", "split", "mixed", "wcpb", "slo")
World = Literal["sim", "executor"]


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The axes by which runs are compared, and the hash that pins everything else.

    `model` and `device` are short names (of a file: its stem), `policy_options` what was set beside the
    policy's name (in a summary: only what differs from its defaults), `chunk_tokens` the prompt chunk in
    tokens, `num_loops` the model's depths T, `config_sha256` the hash of the resolved config.
    """

    world: World
    model: str
    device: str
    policy: str
    workload: str
    chunk_tokens: int
    num_loops: int
    config_sha256: str
    policy_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        world: World,
        num_loops: int,
        workload: str | None = None,
        device: str | None = None,
    ) -> "RunIdentity":
        """Read the identity off a resolved config.

        `workload` and `device` replace the names derived from the config: a workload is called by its preset
        or its file's stem, else by its kind; an executor knows better than the config what card it ran on.
        """
        policy = dict(config["policy"])
        scheduler = config.get("scheduler", {})
        return cls(
            world=world,
            model=short_name(str(config["model"])),
            device=device or short_name(str(config.get("device", "unknown"))),
            policy=str(policy.pop("name")),
            workload=workload or workload_name(config.get("workload", {})),
            chunk_tokens=int(
                scheduler.get("prefill_chunk_size") or scheduler.get("max_num_batched_tokens", 0)
            ),
            num_loops=num_loops,
            config_sha256=config_hash(config),
            policy_options=policy,
        )

    @property
    def directory_name(self) -> str:
        """`<model>-<device>-<policy>-<workload>-c<chunk>-<hash>`: the same config always has the same name,
        two configs never do.

        A run of `ouro-1.4b` on `h200` under wcpb over `seed-4x8064` in chunks of 16 is
        `ouro-1.4b-h200-wcpb-seed-4x8064-c16-1f0c9a3e`.
        """
        names = (self.model, self.device, self.policy, self.workload)
        return "-".join([*map(slug, names), f"c{self.chunk_tokens}", self.config_sha256[:8]])

    def as_summary(self) -> dict[str, Any]:
        """The identity as keys of `summary.json`; the chunk goes by its config name, `prefill_chunk_size`."""
        return {
            "policy": self.policy,
            "policy_options": dict(self.policy_options),
            "model": self.model,
            "device": self.device,
            "workload": self.workload,
            "world": self.world,
            "prefill_chunk_size": self.chunk_tokens,
            "num_loops": self.num_loops,
            "config_sha256": self.config_sha256,
        }


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of the config as JSON with sorted keys, so that key order and the file's comments do not
    count."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without what two sides of a comparison may differ in: the device, a model's written shape,
    the weights that stand for a gate in a simulation, and the folders of the workload's files."""
    workload = dict(config["workload"])
    for key in ("path", "dataset"):
        if isinstance(workload.get(key), str):
            workload[key] = PurePosixPath(workload[key]).name
    rest = {key: value for key, value in config.items() if key not in ("device", "model_shape")}
    if isinstance(rest.get("exit"), Mapping):
        rest["exit"] = {key: value for key, value in rest["exit"].items() if key != "loop_weights"}
    return {**rest, "workload": workload}


def workload_name(workload: Mapping[str, Any]) -> str:
    """A preset's name, a trace file's stem, else the workload's own `name` or `kind`; printable."""
    if workload.get("name"):
        return printable(str(workload["name"]))
    if workload.get("path"):
        return printable(Path(str(workload["path"])).stem)
    return printable(str(workload.get("preset") or workload.get("kind") or "workload"))


def short_name(name: str) -> str:
    """A shipped name as it is; of a path, the stem (the folder for a `config.json`); `transfer:DEVICE:CARD`
    with the short name of its device."""
    if name.startswith("transfer:"):
        like, _, card = name.removeprefix("transfer:").rpartition(":")
        return f"transfer:{short_name(like)}:{card}"
    path = Path(name)
    if "/" not in name and path.suffix not in (".json", ".yaml"):
        return name
    if path.name == "config.json" and path.parent.name:
        return path.parent.name
    return path.stem if path.suffix in (".json", ".yaml") else path.name


def policy_label(summary: Mapping[str, Any]) -> str:
    """The policy of a summary and what was set beside it: `wcpb`, or `wcpb mix_decode=false`."""
    options = summary.get("policy_options") or {}
    return " ".join(
        [printable(str(summary["policy"])), *(f"{key}={json.dumps(options[key])}" for key in sorted(options))]
    )


def policy_order(label: str) -> tuple[int, str]:
    """Sort key that keeps the menu's order: atomic, split, mixed, wcpb, then others by name."""
    name = label.split(" ", 1)[0]
    return (POLICY_ORDER.index(name) if name in POLICY_ORDER else len(POLICY_ORDER), label)


def printable(text: str) -> str:
    """`text` on one line: what cannot be printed (a line end, an escape, half a letter of a file's name) is a
    `?`."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def slug(text: str) -> str:
    """`text` as part of a directory name: lower case, anything but letters, digits, dots and underscores a
    single hyphen."""
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-.") or "unnamed"
