"""A checkpoint folder that Hugging Face's transformers wrote, sharded and with its own tokenizer files, says
what the model that wrote it says, in float32 on a CPU.

The model here is a small one of our own with the published names and structure, for the published code is no
package. `OURO_CODE=folder` takes the published `modeling_ouro.py` and `configuration_ouro.py` instead.
"""

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers, which CI does not install")

from checkpoints import write_tokenizer  # noqa: E402
from executor_runs import config_of  # noqa: E402
from torch import nn  # noqa: E402

from executor.run import execute  # noqa: E402
from executor.session import Session  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "total_ut_steps": 4,
    "max_position_embeddings": 4096, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "early_exit_threshold": 1.0, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip


class Config(transformers.PretrainedConfig):
    model_type = "ouro"

    def __init__(self, **values: Any) -> None:
        for name, value in {**SIZES, **values}.items():
            setattr(self, name, value)
        super().__init__(**values)
        self.tie_word_embeddings = False


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.size, self.theta = config.num_attention_heads, config.head_dim, config.rope_theta
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(config.hidden_size, config.hidden_size, bias=False))

    def forward(self, x: Any) -> Any:
        tokens, half = len(x), self.size // 2
        frequency = 1.0 / self.theta ** (torch.arange(0, self.size, 2).float() / self.size)
        angle = torch.outer(torch.arange(tokens).float(), frequency).repeat(1, 2)  # [tokens, head_dim]

        def turned(y: Any) -> Any:
            y = y.view(tokens, self.heads, self.size).transpose(0, 1)  # [heads, tokens, head_dim]
            return y * angle.cos() + torch.cat((-y[..., half:], y[..., :half]), -1) * angle.sin()

        value = self.v_proj(x).view(tokens, self.heads, self.size).transpose(0, 1)
        query, key = turned(self.q_proj(x)), turned(self.k_proj(x))
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(out.transpose(0, 1).reshape(tokens, -1))


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        for at in ("input_layernorm", "post_attention_layernorm"):
            for name in (at, f"{at}_2"):
                setattr(self, name, nn.RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, x: Any) -> Any:
        x = x + self.input_layernorm_2(self.self_attn(self.input_layernorm(x)))
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class Trunk(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)


class OuroForCausalLM(transformers.PreTrainedModel):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, ids: Any) -> Any:
        x = self.model.embed_tokens(ids[0])
        for _ in range(self.config.total_ut_steps):
            for layer in self.model.layers:
                x = layer(x)
            x = self.model.norm(x)
        return self.lm_head(x)[None]

    def _init_weights(self, module: Any) -> None:
        """As drawn below."""


def make_model() -> Any:
    code = os.environ.get("OURO_CODE")
    if not code:
        return OuroForCausalLM(Config())
    config = transformers.AutoConfig.from_pretrained(code, trust_remote_code=True, **SIZES)
    return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)


def test_a_folder_that_transformers_wrote_answers_as_the_model_that_wrote_it(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = make_model().float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = "norm" in name
            weight.copy_(torch.randn_like(weight) * (0.1 if is_norm else weight.shape[-1] ** -0.5) + is_norm)
    folder = tmp_path / "ouro-published"
    model.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    write_tokenizer(tmp_path)
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    texts = ["Ann has 3 apples and buys 12 more.", "Schöne Grüße aus Köln"]
    lines = [f'{{"prompt": "{text}", "max_tokens": 12}}\n' for text in texts]
    (tmp_path / "p.jsonl").write_text("".join(lines), encoding="utf-8")
    workload = f"workload={{kind: prompts, path: {tmp_path / 'p.jsonl'}, ignore_eos: true}}"
    session = Session([config_of(f"model={folder}", workload)], "cpu")
    _, _, found = execute(session, session.runs[0], tmp_path / "run", plots=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for request_id, text in enumerate(texts):
        ids = tokenizer(text).input_ids
        with torch.no_grad():
            for _ in range(12):
                logits = model(torch.tensor([ids]))
                logits = getattr(logits, "logits", logits)
                ids = [*ids, int(logits[0, -1].argmax())]
        assert found[request_id] == ids[-12:]
