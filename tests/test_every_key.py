"""No key is accepted and ignored in silence: each changes the run, is refused, or is named in its notes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from policies.config.fleet import Fleet, Link
from policies.config.hf_config import EXPECTED, READ, WITHOUT_EFFECT, read_hf_config
from policies.config.ignored import ignored_keys
from policies.config.overrides import apply_overrides
from policies.config.runconfig import SECTIONS, SamplingSettings, parse_config
from policies.config.sections import adapter_of
from policies.core.errors import InputError
from policies.core.seam.exits import ExitSettings
from policies.core.seam.guesses import SpeculationSettings
from policies.core.seam.objectives import Objectives, Window
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.registry import POLICIES
from policies.routing.registry import ROUTERS
from sim.run import simulate
from workloads.spec import PresetSpec, PromptsSpec, SyntheticSpec, TraceSpec

BASE: dict[str, Any] = {
    "model": "ouro-tiny",
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "prefill_chunk_size": 16},
    "workload": {
        "kind": "synthetic", "num_requests": 8, "arrival": {"process": "poisson", "rate": 2000},
        "prompt_tokens": [70, 5, 200, 33], "output_tokens": [4, 9, 2],
    },
}  # fmt: skip
PLAIN = (
    "arrival,prompt_tokens,output_tokens,priority,guessed\n0,70,4,3,1\n1,5,9,0,0\n1,200,2,0,\n2,33,4,-1,0 1\n"
)
BLOCKS = "".join(
    json.dumps({"timestamp": 9 * at, "input_length": 70, "output_length": 4, "hash_ids": [5, at]}) + "\n"
    for at in range(1, 5)
)
TRACE = "workload={kind: trace, path: plain.csv}"
FAST = "workload.timestamp_unit=ns"
MOONCAKE = "workload={kind: trace, path: blocks.jsonl, block_tokens: 40}"
PROMPTS = "workload={kind: prompts, path: prompts.jsonl}"
PRESET = "workload={kind: preset, name: chat, num_requests: 5}"
POOL = "cache={num_blocks: 72, allocation: incremental, preemption: recompute, admit: first_chunk}"
SWAP = "cache={num_blocks: 72, allocation: incremental, preemption: swap, admit: first_chunk}"
SLO = "policy={name: slo, ttft_ms: 20, itl_ms: 0.55, model: h200}"
APART = "fleet={prefill: 1, decode: 1}"
AFFINITY = "fleet={replicas: 2, router: prefix_affinity}"
PREFIXES = "workload.shared_prefix={groups: 3, tokens: 32}"
CROWD = ["workload.num_requests=24", "workload.arrival.rate=1000"]
GATE = "exit={mode: gate, threshold: 0.5, loop_weights: [1, 2, 1, 1]}"
LOOPS = "workload.exit_loops=[1, 2, 3]"
GUESSES = "speculation={mode: loops, acceptance: 0.7}"

CASES: list[tuple[str, list[str], str]] = [
    ("changes", [], "model=ouro-1.4b"),
    ("changes", ["model=ouro-1.4b"], "device=h200-analytic"),
    ("changes", [], "policy=atomic"),
    ("changes", ["policy=wcpb"], "policy.mix_decode=false"),
    ("changes", ["policy=wcpb"], "policy.fuse_prelude=false"),
    ("changes", [], SLO),
    ("refused", [], "policy={name: slo, itl_ms: 20}"),
    ("changes", [*CROWD, SLO], "policy.ttft_ms=0.1"),
    ("changes", [*CROWD, SLO], "policy.itl_ms=5"),
    ("changes", [*CROWD, SLO], "policy.gaps=banked"),
    ("changes", [*CROWD, SLO], "policy.model=a100-seed"),
    ("changes", [*CROWD, SLO], "policy.margin=2"),
    ("changes", [*CROWD, "policy=sjf"], "policy.ms_per_token=0"),
    ("changes", [], "seed=1"),
    ("named", [], "attention=triton"),
    *(("changes", [], f"slo.{name}=20") for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")),
    ("changes", ["slo.ttft_ms=20"], "slo.share=0.5"),
    ("refused", [], "slo.share=0.5"),
    ("changes", [], "measure.skip_requests=3"),
    ("changes", [], "measure.skip_s=0.001"),
    ("changes", [], "measure.until_s=0.002"),
    ("refused", [], "model_shape={}"),
    ("changes", [], "fleet.replicas=2"),
    ("changes", ["fleet.replicas=2"], "fleet.router=random"),
    ("changes", ["model=ouro-1.4b"], "fleet.devices=[h200, h200-analytic]"),
    ("changes", [*CROWD, PREFIXES, AFFINITY], "fleet.router.max_lead=0"),
    ("changes", [*CROWD, PREFIXES, AFFINITY], "fleet.router.memory=1"),
    ("refused", ["fleet.replicas=2"], "fleet.router.max_lead=0"),
    ("refused", [], "fleet.prefill=1"),
    ("changes", [APART], "fleet.prefill=2"),
    ("changes", [APART], "fleet.decode=2"),
    ("changes", [APART], "fleet.link.gb_per_s=0.1"),
    ("changes", [APART], "fleet.link.latency_us=900"),
    ("changes", [APART, "fleet.decode=2", "fleet.link.gb_per_s=0.1"], "fleet.link.per=pair"),
    ("changes", [APART, "fleet.link.gb_per_s=0.1"], "fleet.link.faults=[{from_s: 0, until_s: 9}]"),
    ("refused", ["fleet.replicas=2"], "fleet.link={}"),
    ("refused", [], "role=decode"),
    ("changes", [], "scheduler.max_num_seqs=1"),
    ("changes", [], "scheduler.max_num_batched_tokens=32"),
    ("changes", [], "scheduler.prefill_chunk_size=32"),
    ("changes", [], "scheduler.decode=no_refill"),
    ("changes", [], "scheduler.inflight=1"),
    ("changes", [TRACE, FAST, "scheduler.max_num_seqs=1"], "scheduler.admission=priority"),
    ("changes", ["cache.num_blocks=60"], "scheduler.admission_scan_limit=1"),
    ("changes", ["cache.num_blocks=60"], "scheduler.max_admission_bypasses=0"),
    ("changes", ["policy=split"], "scheduler.max_prefill_batches_before_decode=4"),
    ("changes", [], "scheduler.min_coda_batch_size=3"),
    ("changes", [], "cache.block_size=32"),
    ("changes", [], "cache.num_blocks=60"),
    (
        "changes",
        ["policy=atomic", "scheduler.prefill_chunk_size=1", "cache.num_blocks=60"],
        "cache.layout=shared",
    ),
    ("changes", ["workload.shared_prefix={groups: 1, tokens: 32}"], "cache.prefix_caching=true"),
    ("named", [], "cache.prefix_caching=true"),
    (
        "changes",
        ["cache.num_blocks=72", "cache.preemption=recompute", "workload.output_tokens=40"],
        "cache.allocation=incremental",
    ),
    ("changes", [POOL], "cache.preemption=swap"),
    ("changes", [POOL], "cache.watermark=0.6"),
    ("named", [], "cache.watermark=0.6"),
    ("changes", [POOL], "cache.admit=whole_context"),
    ("named", [], "cache.admit=first_chunk"),
    ("changes", [SWAP], "cache.swap_blocks=0"),
    ("named", [POOL], "cache.swap_blocks=4"),
    ("changes", [LOOPS], "exit.mode=trace"),
    ("changes", [GATE], "exit.min_loops=3"),
    ("changes", [GATE], "exit.max_loops=2"),
    ("changes", [GATE], "exit.loop_weights=[1, 0, 0, 9]"),
    ("named", [GATE], "exit.threshold=0.6"),
    ("named", [LOOPS, "exit.mode=trace"], "exit.threshold=0.6"),
    ("named", [LOOPS, "exit.mode=trace"], "exit.loop_weights=[1, 1, 1, 1]"),
    ("named", ["exit.mode=gate"], "exit.loop_weights=[1, 1, 1, 1]"),
    ("named", ["exit.mode=gate"], "exit.min_loops=2"),
    ("refused", [], "exit.min_loops=2"),
    ("refused", [], "exit.threshold=0.5"),
    ("changes", [], GUESSES),
    ("refused", [GUESSES], "speculation.mode=off"),
    ("changes", [GUESSES], "speculation.draft_loops=1"),
    ("changes", [GUESSES, "speculation.draft_loops=1"], "speculation.max_tokens=1"),
    ("changes", [GUESSES], "speculation.acceptance=[0.1, 0.9]"),
    ("changes", [TRACE, FAST, GUESSES], "speculation.acceptance=trace"),
    ("refused", [GUESSES], "speculation.acceptance=trace"),
    ("refused", [], "speculation.acceptance=0.5"),
    ("refused", [], GUESSES.replace(", acceptance: 0.7", "")),
    ("named", [], "sampling.temperature=0.5"),
    ("named", [], "sampling.top_k=5"),
    ("named", [], "sampling.top_p=0.5"),
    ("changes", [], PRESET),
    ("changes", [], "workload.num_requests=7"),
    ("changes", [], "workload.arrival={process: burst}"),
    ("changes", [], "workload.prompt_tokens=40"),
    ("changes", [], "workload.output_tokens=3"),
    ("changes", ["cache.prefix_caching=true"], "workload.shared_prefix={groups: 1, tokens: 32}"),
    ("changes", ["exit.mode=trace", LOOPS], "workload.exit_loops=4"),
    ("named", [], "workload.exit_loops=4"),
    ("changes", [], "workload.max_tokens=2"),
    ("changes", [], "workload.max_context=100"),
    ("changes", [], "workload.patience_ms=1"),
    ("refused", [], "workload.kind=trace"),
    ("changes", [TRACE], "workload.path=other.csv"),
    ("refused", [TRACE], "workload.format=azure"),
    ("changes", [TRACE], "workload.limit=2"),
    ("changes", [TRACE], "workload.repeat=2"),
    ("changes", [TRACE], "workload.jitter_s=1.0"),
    ("changes", [TRACE], "workload.time_scale=2.0"),
    ("changes", [TRACE], "workload.timestamp_unit=ms"),
    ("refused", [TRACE], "workload.block_tokens=16"),
    ("changes", [MOONCAKE, "cache.prefix_caching=true"], "workload.block_tokens=64"),
    ("changes", [TRACE], "workload.arrival={process: burst}"),
    ("changes", [TRACE], "workload.concurrency=1"),
    ("refused", [TRACE, "workload.arrival={process: closed, concurrency: 2}"], "workload.concurrency=1"),
    ("changes", [TRACE], "workload.max_tokens=2"),
    ("changes", [TRACE], "workload.max_context=100"),
    ("changes", [TRACE], "workload.patience_ms=1"),
    ("refused", [TRACE], "workload.dataset=plain.csv"),
    ("changes", [TRACE], "workload.start_s=1.0"),
    ("changes", [TRACE], "workload.end_s=1.0"),
    ("changes", [TRACE], "workload.rate=40.0"),
    ("refused", [TRACE, "workload.time_scale=2.0"], "workload.rate=3.0"),
    (
        "changes",
        [TRACE],
        "workload.columns={arrival: arrival, prompt_tokens: output_tokens, output_tokens: output_tokens}",
    ),
    ("refused", [TRACE, "workload.format=plain"], "workload.columns={prompt_tokens: a, output_tokens: b}"),
    ("changes", [PRESET], "workload.name=seed-32-mixed"),
    ("changes", [PRESET], "workload.num_requests=4"),
    ("changes", [PRESET], "workload.arrival={process: burst}"),
    ("changes", [PRESET], "workload.prompt_tokens=40"),
    ("changes", [PRESET], "workload.output_tokens=3"),
    ("changes", [PRESET, "cache.prefix_caching=true"], "workload.shared_prefix={groups: 1, tokens: 32}"),
    ("named", [PRESET], "workload.exit_loops=4"),
    ("changes", [PRESET], "workload.max_tokens=2"),
    ("changes", [PRESET], "workload.max_context=100"),
    ("changes", [PRESET], "workload.patience_ms=1"),
    ("changes", [PRESET], "workload.rate=3.0"),
    ("changes", [PRESET, "workload.rate=3000"], "workload.concurrency=1"),
    ("changes", [PROMPTS], "workload.path=other.jsonl"),
    ("changes", [PROMPTS], "workload.limit=1"),
    ("changes", [PROMPTS], "workload.arrival={process: constant, rate: 100}"),
    ("changes", [PROMPTS], "workload.max_tokens=2"),
    ("named", [PROMPTS], "workload.ignore_eos=true"),
    ("refused", [PROMPTS], "workload.tokenizer=nowhere.json"),
    ("changes", [PROMPTS], "workload.max_context=10"),
    ("changes", [PROMPTS], "workload.patience_ms=1"),
]


def outcome(folder: Path, overrides: list[str], out: str) -> tuple[bytes, list[str]]:
    """The logs and the notes of a run."""
    config = parse_config(apply_overrides(BASE, overrides), folder, "test.yaml")
    path, summary = simulate(config, folder / out, plots=False)
    judged = json.dumps([summary.get(key) for key in ("slo", "measured", "ttft_ms", "request_throughput")])
    logs = b"".join(file.read_bytes() for file in sorted(path.rglob("*s.csv")))
    return logs + judged.encode(), summary["notes"]


@pytest.mark.parametrize(
    ("expected", "given", "override"), CASES, ids=[f"{item[2]}-{at}" for at, item in enumerate(CASES)]
)
def test_a_key_changes_the_run_or_is_refused_or_is_named(
    tmp_path: Path, expected: str, given: list[str], override: str
) -> None:
    (tmp_path / "plain.csv").write_text(PLAIN)
    (tmp_path / "other.csv").write_text(PLAIN.replace("70", "71"))
    (tmp_path / "blocks.jsonl").write_text(BLOCKS)
    for name in ("prompts.jsonl", "other.jsonl"):
        lines = [{"prompt": [1, 2, 3] * len(name)}, {"prompt": [4], "max_tokens": 3}]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    before, _ = outcome(tmp_path, given, "before")
    key = override.partition("=")[0]
    try:
        after, notes = outcome(tmp_path, [*given, override], "after")
    except InputError as error:
        assert expected == "refused", str(error)
        return
    named = any(key.partition(".")[0] in note and "no effect" in note for note in notes)
    assert ("changes" if after != before else "named" if named else "ignored") == expected


def test_the_walk_leaves_no_key_out() -> None:
    walked = {override.partition("=")[0] for _, _, override in CASES}
    sections = {
        "scheduler": SchedulerSettings, "cache": CacheSettings, "exit": ExitSettings,
        "sampling": SamplingSettings, "policy": POLICIES["wcpb"], "slo": Objectives, "measure": Window,
        "fleet": Fleet, "speculation": SpeculationSettings,
    }  # fmt: skip
    keys = {f"{name}.{item.name}" for name, kind in sections.items() for item in dataclasses.fields(kind)}
    for name in ("slo", "sjf"):
        keys |= {f"policy.{item.name}" for item in dataclasses.fields(POLICIES[name])}  # type: ignore[arg-type]
    keys |= {f"fleet.router.{item.name}" for item in dataclasses.fields(ROUTERS["prefix_affinity"])}  # type: ignore[arg-type]
    keys |= {f"fleet.link.{item.name}" for item in dataclasses.fields(Link)}
    kinds = (TraceSpec, SyntheticSpec, PresetSpec, PromptsSpec)
    keys |= {f"workload.{name}" for spec in kinds for name in spec.model_fields}
    keys |= set(SECTIONS) - set(sections) | {"policy"}
    assert keys - walked == set()
    assert [name for name, router in ROUTERS.items() if dataclasses.fields(router)] == ["prefix_affinity"]  # type: ignore[arg-type]
    assert [name for name, policy in POLICIES.items() if dataclasses.fields(policy)] == ["wcpb", "slo", "sjf"]  # type: ignore[arg-type]


def test_the_executor_names_what_it_does_not_use() -> None:
    for override, key in (
        ("sampling.top_k=5", "sampling.top_k and top_p"),
        ("exit={mode: gate, threshold: 0.5, loop_weights: [1, 1, 1, 1]}", "exit.loop_weights"),
    ):
        config = parse_config(apply_overrides(BASE, [override]), Path(), "test.yaml")
        (note,) = ignored_keys(config, "executor", False)
        assert note.startswith(f"{key} has no effect: ")


def test_engines_apart_name_what_one_side_does_not_use(tmp_path: Path) -> None:
    apart = "fleet={prefill: 1, decode: 1}"
    given = [apart, PREFIXES, "cache.prefix_caching=true", "cache.allocation=incremental"]
    _, notes = outcome(tmp_path, [*given, "cache.preemption=recompute"], "run")
    named = [note.partition(" has")[0].partition(" have")[0] for note in notes if "engines that" in note]
    assert named == ["cache.prefix_caching", "cache.allocation and cache.preemption"]
    _, notes = outcome(tmp_path, [apart], "plain")
    assert not any("engines that" in note for note in notes)


PUBLISHED: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"], "model_type": "ouro", "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 176,
    "layer_types": ["full_attention"], "max_position_embeddings": 4096, "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 1e6, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "total_ut_steps": 4, "early_exit_threshold": 1.0, "vocab_size": 512,
}  # fmt: skip
HF_CHANGES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 128, "intermediate_size": 100, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "total_ut_steps": 3,
    "max_position_embeddings": 99, "rope_theta": 1e4, "rms_norm_eps": 1e-5, "bos_token_id": 3,
    "eos_token_id": 3, "dtype": "float32", "torch_dtype": "float32", "model_type": "llama",
    "rope_scaling": {"type": "linear"}, "use_sliding_window": True, "tie_word_embeddings": True,
    "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "quantization_config": {},
    "partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e4}, "layer_types": ["sliding"],
    "sliding_window": 4096, "early_exit_threshold": 0.8, "quantization": {"bits": 4}, "logit_scale": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("key", HF_CHANGES)
def test_a_key_of_a_hugging_face_config_changes_the_shape_or_is_refused_or_is_named(
    tmp_path: Path, key: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED))
    before = read_hf_config(path)
    assert before.notes == ()
    path.write_text(json.dumps({**PUBLISHED, key: HF_CHANGES[key]}))
    try:
        after = read_hf_config(path)
    except InputError as error:
        assert key in str(error) or key in ("dtype", "rope_parameters")
        return
    assert after.shape != before.shape or any(key in note for note in after.notes)


def test_the_walk_leaves_no_key_of_a_hugging_face_config_out() -> None:
    assert {*READ, *EXPECTED} - HF_CHANGES.keys() == set()
    assert PUBLISHED.keys() - HF_CHANGES.keys() <= WITHOUT_EFFECT


def test_a_section_s_reader_is_made_once() -> None:
    """While pydantic builds one a Ctrl-C is lost."""
    assert adapter_of(SchedulerSettings) is adapter_of(SchedulerSettings)
