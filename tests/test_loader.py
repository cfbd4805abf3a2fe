"""A checkpoint loads exactly, whole or sharded, and every way it can be wrong is one sentence naming file and
tensor or key."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
save_file = pytest.importorskip("safetensors.torch", reason="needs safetensors to write test files").save_file

from executor.model.checkpoint import INDEX_FILE, SINGLE_FILE, load_checkpoint  # noqa: E402
from executor.model.config import resolve_model  # noqa: E402
from executor.model.weights import named_tensors, random_weights  # noqa: E402
from policies.config.hf_config import shape_from_hf_config  # noqa: E402
from policies.core.errors import InputError  # noqa: E402
from policies.core.models.shape import OURO_1_4B, OURO_TINY  # noqa: E402

CPU = torch.device("cpu")
torch.set_num_threads(1)

OURO_CONFIG = {
    "architectures": ["OuroForCausalLM"], "model_type": "ouro",
    "auto_map": {"AutoModel": "modeling_ouro.OuroModel"}, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632,
    "layer_types": ["full_attention"] * 24, "max_position_embeddings": 65536, "max_window_layers": 24,
    "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "total_ut_steps": 4, "early_exit_threshold": 1.0, "use_sliding_window": False,
    "vocab_size": 49152,
}  # fmt: skip


def tiny_tensors() -> dict[str, torch.Tensor]:
    weights = random_weights(OURO_TINY, 5, torch.float32, CPU)
    return {name: tensor.clone() for name, tensor in named_tensors(OURO_TINY, weights)}


def write_config(folder: Path, **changes: object) -> Path:
    values = {key: value for key, value in {**OURO_CONFIG, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder / "config.json"


def load(folder: Path, shape=OURO_TINY):
    return load_checkpoint(folder, shape, torch.float32, CPU)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        save_file(broken(lambda t, value=value: t[Q].fill_(value)), tmp_path / SINGLE_FILE)
        with pytest.raises(InputError, match=f"tensor {Q} holds NaN or infinite values"):
            load(tmp_path)


def test_weights_in_another_format_are_not_replaced_by_random_ones(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match=r"holds 'pytorch_model.bin' and no \*.safetensors"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tmp_path / "config.json")).checkpoint is None


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    names = list(tensors)
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file_name in sorted(set(weight_map.values())):
        save_file(
            {name: tensors[name] for name in names if weight_map[name] == file_name}, folder / file_name
        )
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_a_single_file_and_shards_load_the_same_values(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    for folder, write in (
        (tmp_path / "one", lambda at: save_file(tensors, at / SINGLE_FILE)),
        (tmp_path / "two", None),
    ):
        folder.mkdir()
        if write:
            write(folder)
        else:
            write_shards(folder, tensors)
        loaded = dict(named_tensors(OURO_TINY, load(folder)))
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_bfloat16_files_load_into_float32(tmp_path: Path) -> None:
    from dataclasses import replace

    tensors = {name: tensor.bfloat16() for name, tensor in tiny_tensors().items()}
    save_file(tensors, tmp_path / SINGLE_FILE)
    loaded = dict(named_tensors(OURO_TINY, load(tmp_path, replace(OURO_TINY, dtype_bytes=2))))
    assert all(torch.equal(loaded[name], tensors[name].float()) for name in tensors)


def broken(change) -> dict[str, torch.Tensor]:
    tensors = tiny_tensors()
    change(tensors)
    return tensors


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop(Q), f"tensor {Q} is missing, expected F32 \\[64, 64\\]"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(3)}),
            "unexpected tensor model.layers.2.mlp.up_proj",
        ),
        (
            lambda t: t.update({Q: torch.zeros(64, 32)}),
            f"tensor {Q} has shape \\[64, 32\\], expected \\[64, 64\\]",
        ),
        (lambda t: t.update({Q: t[Q].half()}), f"tensor {Q} has dtype F16, expected F32"),
        (lambda t: t.update({Q: t[Q].bfloat16()}), f"tensor {Q} has dtype BF16, expected F32"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, change, sentence: str) -> None:
    save_file(broken(change), tmp_path / SINGLE_FILE)
    with pytest.raises(InputError, match=sentence):
        load(tmp_path)


def rewrite_header(path: Path, change) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: path.write_bytes(b""), "no safetensors file .*header too small"),
        (lambda path: path.write_bytes(b"\xff" * 100), "no safetensors file .*header too large"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated, corrupt .*not fully covered"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "truncated, corrupt .*not fully covered"),
        (lambda path: path.write_bytes((4).to_bytes(8, "little") + b"{ab}"), "invalid JSON in header"),
        (lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"), "invalid JSON in header"),
        (lambda path: path.write_bytes((10**5).to_bytes(8, "little") + b"[" * 10**5), "JSON in header"),
        (lambda path: path.unlink(), "no such file, expected a safetensors file"),
        (lambda path: rewrite_header(path, lambda h: h[Q].pop("dtype")), "missing field `dtype`"),
        (
            lambda path: rewrite_header(path, lambda h: h[Q].update(data_offsets=[0, -4])),
            "invalid value: integer `-4`",
        ),
        (
            lambda path: rewrite_header(path, lambda h: h[Q].update(shape=[64, 63])),
            "invalid shape, data type, or offset for tensor",
        ),
        (
            lambda path: rewrite_header(path, lambda h: h[Q].update(shape=[2**62, 2**62])),
            "overflow computing buffer size",
        ),
        (
            lambda path: rewrite_header(path, lambda h: h[Q].update(data_offsets=[0, 16384])),
            "invalid offset for tensor",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage, sentence: str) -> None:
    save_file(tiny_tensors(), tmp_path / SINGLE_FILE)
    damage(tmp_path / SINGLE_FILE)
    with pytest.raises(InputError, match=sentence) as caught:
        load(tmp_path)
    assert "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda index: index.pop("weight_map"), "weight_map is missing"),
        (
            lambda index: index["weight_map"].update({Q: "../other.safetensors"}),
            "expected a file of the same folder",
        ),
        (lambda index: index["weight_map"].pop(Q), f"holds tensor {Q}, the index places it in no file"),
        (
            lambda index: index["weight_map"].update({"extra": "model-00001-of-00002.safetensors"}),
            "tensor extra is missing",
        ),
        (
            lambda index: index["weight_map"].update({"extra": "absent.safetensors"}),
            "absent.safetensors: no such file",
        ),
    ],
)
def test_a_wrong_index_is_named(tmp_path: Path, change, sentence: str) -> None:
    write_shards(tmp_path, tiny_tensors())
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    change(index)
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(InputError, match=sentence):
        load(tmp_path)


def test_the_published_config_gives_the_shipped_shape(tmp_path: Path) -> None:
    from dataclasses import replace

    shape = shape_from_hf_config(write_config(tmp_path))
    assert replace(shape, name=OURO_1_4B.name) == OURO_1_4B
    assert resolve_model(str(tmp_path / "config.json")).checkpoint is None
    with pytest.raises(InputError, match=r"holds no .*safetensors.*config.json itself for random weights"):
        resolve_model(str(tmp_path))
    (tmp_path / SINGLE_FILE).write_bytes(b"")
    assert resolve_model(str(tmp_path)).checkpoint == tmp_path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn"}),
        ("use_sliding_window", True),
        ("layer_types", ["sliding_attention"] * 24),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("model_type", "llama"),
        ("torch_dtype", "float16"),
        ("quantization_config", {"bits": 4}),
        ("hidden_size", 0),
        ("hidden_size", "2048"),
        ("num_key_value_heads", 5),
        ("head_dim", 127),
        ("rms_norm_eps", -1.0),
        ("eos_token_id", 49152),
        ("total_ut_steps", "absent"),
        ("vocab_size", "absent"),
    ],
)
def test_an_unsupported_or_wrong_setting_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    path = write_config(tmp_path, **{key: value})
    with pytest.raises(InputError, match=rf"config.json: {key} (is|is missing).*expected") as caught:
        shape_from_hf_config(path)
    assert str(path) in str(caught.value)


def test_a_config_that_is_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        shape_from_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        shape_from_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="expected a JSON object"):
        shape_from_hf_config(tmp_path)


def test_a_head_size_without_a_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="head_dim is 96, the executor supports 16, 32, 64, 128"):
        resolve_model(str(write_config(tmp_path, head_dim=96)))
