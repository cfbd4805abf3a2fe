"""A checkpoint folder like a published one, made for tests: sharded random weights, a tokenizer, a chat
template."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from executor.model.weights import named_tensors, random_weights
from policies.core.models.shape import OURO_TINY

TEXT = ["Ann has 3 apples and buys 12 more. How many? She has 15.", "Schöne Grüße aus Köln 你好 🙂", "user: "]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
EOS = 1


def write_tokenizer(folder: Path, vocab_size: int = OURO_TINY.vocab_size) -> None:
    """A byte-level tokenizer with fewer tokens than `vocab_size`, whose token 0 begins a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": {"content": "</s>"}})
    )


def write_checkpoint(folder: Path, seed: int = 0, eos: int | list[int] = EOS) -> Path:
    """ouro-tiny in float32, in two shards."""
    shape = OURO_TINY
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "ouro", "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim, "total_ut_steps": shape.num_loops, "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps, "max_position_embeddings": 4096, "torch_dtype": "float32",
        "early_exit_threshold": 1.0, "bos_token_id": 0, "eos_token_id": eos,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    weights = random_weights(shape, seed, torch.float32, torch.device("cpu"))
    tensors = {name: tensor.contiguous() for name, tensor in named_tensors(shape, weights)}
    names, half = list(tensors), len(tensors) // 2
    weight_map = {}
    for number, held in enumerate((names[:half], names[half:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in held}, folder / file)
        weight_map |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write_tokenizer(folder)
    return folder
