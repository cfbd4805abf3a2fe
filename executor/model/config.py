"""From the `model:` value of a run to a shape and, when there is one, the folder of its checkpoint. Reads no
tensor."""

import dataclasses
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from policies.config.hf_config import shape_from_hf_config
from policies.core.errors import InputError
from policies.core.models.shape import SHIPPED_MODELS, ModelShape
from policies.process.sentences import shown

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = [
    "config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json",
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
]  # fmt: skip
OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".pkl"}
KERNEL_HEAD_DIMS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model to run: its shape, and the checkpoint folder its weights come from (None: seeded random
    weights)."""

    shape: ModelShape
    checkpoint: Path | None


def resolve_model(spec: str) -> ModelSource:
    """What `spec` names: a shipped shape, a `config.json` (random weights), a checkpoint folder, or a hub id.

    A folder must hold weights: whoever wants random ones names its `config.json`. A hub id (`owner/name`) is
    resolved through huggingface_hub when that is installed. Raises `InputError` naming what was given and
    what was expected.
    """
    if spec in SHIPPED_MODELS:
        if not spec.startswith("ouro"):
            raise InputError(f"model: {spec} is a shape for simulations, the executor runs Ouro")
        return ModelSource(SHIPPED_MODELS[spec], None)
    path = Path(spec)
    if os.path.exists(path):
        shape = shape_from_hf_config(path)
    else:
        if not HUB_ID.fullmatch(spec) or spec.endswith(".json"):
            names = ", ".join(SHIPPED_MODELS)
            raise InputError(
                f"model: expected one of {names}, a config.json or a checkpoint folder, found {shown(spec)}, "
                "which is none"
            )
        path = _from_hub(spec)
        shape = dataclasses.replace(shape_from_hf_config(path), name=Path(spec).name)
    if shape.head_dim not in KERNEL_HEAD_DIMS:
        raise InputError(
            f"{path}: head_dim is {shape.head_dim}, the executor supports "
            f"{', '.join(map(str, KERNEL_HEAD_DIMS))}"
        )
    if path.is_dir():
        _check_weights(path)
        return ModelSource(shape, path)
    return ModelSource(shape, None)


def _check_weights(folder: Path) -> None:
    """Raise `InputError` for a folder without weights that can be read."""
    if any(folder.glob("*.safetensors*")):
        return
    others = sorted(item.name for item in folder.iterdir() if item.suffix in OTHER_WEIGHTS)
    found = f"holds {shown(others[0])} and no *.safetensors" if others else "holds no *.safetensors"
    raise InputError(
        f"{folder}: {found}, the one format of weights that is read; expected a checkpoint, or the path of "
        "config.json itself for random weights"
    )


def _from_hub(spec: str) -> Path:
    if find_spec("huggingface_hub") is None:
        raise InputError(
            f"model: {spec!r} is no local path, and a hub id needs the package huggingface_hub, which is not "
            "installed: pip install huggingface_hub or give a checkpoint folder"
        )
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(spec, allow_patterns=HUB_FILES))
    except (
        Exception
    ) as error:  # the hub client raises a dozen unrelated classes; each means that the id was not resolved
        reason = str(error).strip().splitlines()[:1]
        raise InputError(
            f"model: hub id {spec!r} could not be resolved: {type(error).__name__} {' '.join(reason)}"
        ) from None
