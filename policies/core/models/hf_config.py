"""Reads the shape of a looped model from a Hugging Face `config.json`. Standard library only, so both worlds
can use it.

Everything that would change the arithmetic and is not implemented is refused by the name of its key, never
ignored.
"""

import json
from pathlib import Path
from typing import Any

from policies.core.errors import InputError
from policies.core.models.shape import ModelShape

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def shape_from_hf_config(path: Path | str) -> ModelShape:
    """The `ModelShape` that `path` (a `config.json`, or the folder that holds one) describes.

    Raises `InputError` naming the file, the key, what it holds and what was expected.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file, expected a Hugging Face config.json") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return _Reader(path, values).shape()


class _Reader:
    """One parsed config with its file name, for error sentences."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def shape(self) -> ModelShape:
        self._refuse_unsupported()
        hidden_size = self._positive("hidden_size")
        num_heads = self._positive("num_attention_heads")
        num_kv_heads = self._positive("num_key_value_heads", num_heads)
        head_dim = self._positive("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise self._wrong(
                "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads {num_heads}"
            )
        if head_dim % 2:
            raise self._wrong("head_dim", head_dim, "an even number (RoPE rotates its two halves)")
        return ModelShape(
            name=self.path.parent.name or "config",
            vocab_size=self._positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self._positive("intermediate_size"),
            num_layers=self._positive("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_loops=self._positive("total_ut_steps"),
            max_context_tokens=self._positive("max_position_embeddings"),
            rope_theta=self._number("rope_theta", self._rope_parameters().get("rope_theta", 1e6)),
            rms_norm_eps=self._number("rms_norm_eps", 1e-6),
            bos_token_id=self._token("bos_token_id"),
            eos_token_id=self._token("eos_token_id"),
            dtype_bytes=self._dtype_bytes(),
        )

    def _refuse_unsupported(self) -> None:
        expect = self._expect
        expect("model_type", ("ouro",), "ouro")
        expect("rope_scaling", (None,), None)
        if self._rope_parameters().get("rope_type", "default") != "default":
            raise self._wrong(
                "rope_parameters",
                self.values["rope_parameters"],
                "rope_type default (RoPE scaling is not supported)",
            )
        expect("use_sliding_window", (False, None), False)
        layer_types = self.values.get("layer_types") or []
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            raise self._wrong("layer_types", layer_types, "full_attention in every layer")
        if self.values.get("sliding_window") is not None and "use_sliding_window" not in self.values:
            raise self._wrong("sliding_window", self.values["sliding_window"], "null")
        expect("tie_word_embeddings", (False,), False)
        expect("attention_bias", (False, None), False)
        expect("mlp_bias", (False, None), False)
        expect("hidden_act", ("silu",), "silu")
        expect("quantization_config", (None,), None)
        expect("partial_rotary_factor", (1, 1.0, None), None)

    def _rope_parameters(self) -> dict[str, Any]:
        found = self.values.get("rope_parameters")
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise self._wrong("rope_parameters", found, "an object or null")
        return found

    def _dtype_bytes(self) -> int:
        key = "dtype" if "dtype" in self.values else "torch_dtype"
        found = self.values.get(key, "bfloat16")
        if found not in DTYPE_BYTES:
            raise self._wrong(key, found, " or ".join(DTYPE_BYTES))
        return DTYPE_BYTES[found]

    def _expect(self, key: str, allowed: tuple[Any, ...], default: Any) -> None:
        found = self.values.get(key, default)
        if not any(found is value or (found == value and type(found) is type(value)) for value in allowed):
            raise self._wrong(
                key,
                found,
                " or ".join(json.dumps(value) for value in allowed) + " (nothing else is supported)",
            )

    def _positive(self, key: str, default: int | None = None) -> int:
        found = self.values.get(key)
        found = default if found is None else found
        if type(found) is not int or found < 1:
            raise self._wrong(key, found, "a positive integer")
        return found

    def _number(self, key: str, default: float) -> float:
        found = self.values.get(key, default)
        if type(found) not in (int, float) or not found > 0:
            raise self._wrong(key, found, "a positive number")
        return float(found)

    def _token(self, key: str) -> int:
        found = self.values.get(key)
        if found is None:
            return 0
        if type(found) is not int or not 0 <= found < self._positive("vocab_size"):
            raise self._wrong(key, found, f"a token id below vocab_size {self._positive('vocab_size')}")
        return found

    def _wrong(self, key: str, found: Any, expected: str) -> InputError:
        state = "is missing" if key not in self.values else f"is {json.dumps(found)}"
        return InputError(f"{self.path}: {key} {state}, expected {expected}")
