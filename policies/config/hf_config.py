"""The shape of a looped model from a Hugging Face `config.json`, for both worlds.

Every key is one of four kinds: it sets a size, it must have the one value that is implemented, it has no part
in inference, or it is named as ignored. What would change the arithmetic is refused by the name of its key.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from policies.core.errors import InputError
from policies.core.models.shape import ModelShape
from policies.process.documents import read_json
from policies.process.sentences import QUOTED, expectation, shown

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "num_loops": "total_ut_steps",
    "max_context_tokens": "max_position_embeddings", "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps", "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id",
}  # fmt: skip
"""Fields of a shape and the keys that set them."""
EXPECTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("ouro",), "rope_scaling": (None,), "use_sliding_window": (False, None),
    "tie_word_embeddings": (False,), "attention_bias": (False, None), "mlp_bias": (False, None),
    "hidden_act": ("silu",), "quantization_config": (None,), "partial_rotary_factor": (None, 1, 1.0),
}  # fmt: skip
"""Keys with the values that are implemented; a missing key has the first."""
WITHOUT_EFFECT = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "early_exit_step", "id2label",
    "initializer_range", "label2id", "max_window_layers", "pad_token_id", "return_dict",
    "transformers_version", "use_cache",
})  # fmt: skip
"""Keys of training, of bookkeeping and of other libraries: inference is the same whatever they say."""
READ = {
    *SIZES.values(),
    *EXPECTED,
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "dtype",
    "torch_dtype",
}
_SHAPES = TypeAdapter(ModelShape)


@dataclass(frozen=True, slots=True)
class HFConfig:
    """What a `config.json` says: the shape, sentences that name what in it is not applied, and the threshold
    of the exit gate that the model was made for (1: it never leaves early)."""

    shape: ModelShape
    notes: tuple[str, ...]
    exit_threshold: float = 1.0


def shape_from_hf_config(path: Path) -> ModelShape:
    """The `ModelShape` that `path` describes. Raises `InputError`."""
    return read_hf_config(path).shape


def read_hf_config(path: Path) -> HFConfig:
    """What `path` (a `config.json`, or the folder that holds one) says.

    Raises `InputError` naming the file, the key, what it holds and what was expected.
    """
    path = path / "config.json" if path.is_dir() else path
    values = read_json(path, "a Hugging Face config.json", 10_000_000)
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return _Reader(path, values).read()


class _Reader:
    """One parsed config with its file name, for error sentences."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def read(self) -> HFConfig:
        self._refuse_unsupported()
        shape = self._shape()
        if shape.num_heads % shape.num_kv_heads:
            raise self._wrong("num_key_value_heads", f"a divisor of num_attention_heads {shape.num_heads}")
        if shape.head_dim % 2:
            raise self._wrong("head_dim", "an even number (RoPE rotates its two halves)")
        for key in ("bos_token_id", "eos_token_id"):
            if (_first(self.values.get(key)) or 0) >= shape.vocab_size:
                raise self._wrong(key, f"a token id below vocab_size {shape.vocab_size}")
        return HFConfig(shape, tuple(self._notes()), self._exit_threshold())

    def _shape(self) -> ModelShape:
        found = {field: self.values[key] for field, key in SIZES.items() if self.values.get(key) is not None}
        if "eos_token_id" in found:
            found["eos_token_id"] = _first(found["eos_token_id"])
        if "rope_theta" in self._rope_parameters():
            found.setdefault("rope_theta", self._rope_parameters()["rope_theta"])
        if isinstance(heads := found.get("num_heads"), int):
            found.setdefault("num_kv_heads", heads)
            if heads > 0 and isinstance(hidden := found.get("hidden_size"), int):
                found.setdefault("head_dim", hidden // heads)
        found |= {"name": self.path.parent.name or "config", "dtype_bytes": self._dtype_bytes()}
        try:
            return _SHAPES.validate_json(json.dumps(found), strict=True)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            key = SIZES.get(str((*problem["loc"], "")[0]), "config")
            is_missing = problem["type"] in ("missing", "missing_argument")
            expected = "a positive integer" if is_missing else expectation(problem["msg"])
            raise self._wrong(key, expected.removeprefix("expected ")) from None

    def _refuse_unsupported(self) -> None:
        for key, allowed in EXPECTED.items():
            found = self.values.get(key, allowed[0])
            if not any(
                found is value or (found == value and type(found) is type(value)) for value in allowed
            ):
                supported = " or ".join(json.dumps(value) for value in allowed)
                raise self._wrong(key, f"{supported} (nothing else is supported)")
        rope = self._rope_parameters()
        if rope.get("rope_type", "default") != "default" or rope.keys() - {"rope_type", "rope_theta"}:
            raise self._wrong("rope_parameters", "rope_type default (RoPE scaling is not supported)")
        if None is not rope.get("rope_theta") != self.values.get("rope_theta", rope.get("rope_theta")):
            raise self._wrong("rope_theta", f"{shown(rope['rope_theta'])}, as rope_parameters says")
        layer_types = self.values.get("layer_types") or []
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            raise self._wrong("layer_types", "full_attention in every layer")
        if self.values.get("sliding_window") is not None and "use_sliding_window" not in self.values:
            raise self._wrong("sliding_window", "null")
        for key, found in self.values.items():
            if "quant" in key.lower() and found is not None:
                raise self._wrong(key, "null: weights are bfloat16 or float32, quantization is not supported")

    def _rope_parameters(self) -> dict[str, Any]:
        found = self.values.get("rope_parameters")
        if found is not None and not isinstance(found, dict):
            raise self._wrong("rope_parameters", "an object or null")
        return found or {}

    def _dtype_bytes(self) -> int:
        key = "dtype" if "dtype" in self.values else "torch_dtype"
        found = self.values.get(key, "bfloat16")
        if not isinstance(found, str) or found not in DTYPE_BYTES:
            raise self._wrong(key, " or ".join(DTYPE_BYTES))
        if self.values.get("torch_dtype", found) != found:
            raise self._wrong("torch_dtype", f"{found}, as dtype says")
        return DTYPE_BYTES[found]

    def _notes(self) -> list[str]:
        notes = []
        threshold = self._exit_threshold()
        if threshold != 1:
            notes.append(
                f"config.json: early_exit_threshold {threshold:g} is what the model was made for; the run's "
                "exit section decides"
            )
        ignored = sorted(self.values.keys() - READ - WITHOUT_EFFECT - {"early_exit_threshold"})
        if ignored:
            notes.append(
                f"config.json: keys that are not known and not applied: {shown(', '.join(ignored))[1:-1]}"
            )
        return notes

    def _exit_threshold(self) -> float:
        value = self.values.get("early_exit_threshold")
        if value is None:
            return 1.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self._wrong("early_exit_threshold", "a number from 0 to 1")
        return float(value)

    def _wrong(self, key: str, expected: str) -> InputError:
        state = "is missing" if key not in self.values else f"is {_json(self.values[key])}"
        return InputError(f"{self.path}: {key} {state}, expected {expected}")


def _first(ids: Any) -> Any:
    """A token id, the first of several."""
    return ids[0] if isinstance(ids, list) and ids else ids


def _json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}..."
