"""Speculation on this device: whether guessed tokens change a bit, how often they are right, and what they
save.

    python -m executor.lab.speculate --out FOLDER [--model NAME] [--device cuda] [--repeats N]

*Identity*: greedy and sampled runs with guesses, against the same requests without, on seeded weights whose
later loops change little (the norms behind attention and MLP have small gains), so that guesses are often
right, and on plain random weights, where they hardly ever are. *Speed*: forced acceptance, one request and
eight at context 512, in turn with runs without guesses. Writes `speculation.json` and prints both tables.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from executor.run import execute
from executor.session import Session
from policies.config.runconfig import RunConfig, parse_config
from results.batchlog import read_batches

QUIET_GAIN = 0.02
"""Of the norms behind attention and MLP; random weights have gains around 1."""
LATENCY = {"max_num_batched_tokens": 64, "prefill_chunk_size": 32}
CASES = [(1, 0.9), (8, 0.9), (1, 0.5), (8, 0.5)]
DRAFTS = [
    ("wcpb", {"draft_loops": 2, "max_tokens": 3}),
    ("wcpb", {"draft_loops": 1, "max_tokens": 3}),
    ("atomic", {"draft_loops": 1, "max_tokens": 3}),
]


def config_of(
    model: str,
    policy: str,
    requests: int,
    prompt: int | list[int],
    output: int,
    guesses: dict[str, Any] | None,
    inflight: int,
    temperature: float = 0.0,
) -> RunConfig:
    raw = {
        "model": model, "policy": policy, "seed": 1,
        "scheduler": {"max_num_seqs": 8, "inflight": inflight, **LATENCY},
        "workload": {"kind": "synthetic", "num_requests": requests, "prompt_tokens": prompt,
                     "output_tokens": output, "arrival": {"process": "burst"}},
        "sampling": {"temperature": temperature},
        **({"speculation": {"mode": "loops", **guesses}} if guesses else {}),
    }  # fmt: skip
    return parse_config(raw, Path("."), "speculate")


def quieten(session: Session, gain: float) -> None:
    """Make every loop change its state little."""
    for layer in session.model.weights.layers:
        for name in ("input_layernorm_2", "post_attention_layernorm_2"):
            getattr(layer, name).fill_(gain)


def identity(model: str, device: str, out: Path, tokens: int) -> Iterator[dict[str, Any]]:
    """Runs with guesses against the same requests without."""
    for temperature in (0.0, 0.8):
        cases: list[tuple[str, dict[str, Any] | None]] = [("wcpb", None), *DRAFTS]
        configs = [
            config_of(model, policy, 8, [200, 37, 90], tokens, guesses, 4, temperature)
            for policy, guesses in cases
        ]
        session = Session(configs, device)
        for weights in ("random", "quiet"):
            if weights == "quiet":
                quieten(session, QUIET_GAIN)
            expected: dict[int, list[int]] = {}
            for run, (policy, guesses) in zip(session.runs, cases, strict=True):
                folder = out / f"{weights}-{temperature}-{policy}-{(guesses or {}).get('draft_loops', 0)}"
                _, summary, found = execute(session, run, folder, plots=False)
                if guesses is None:
                    expected = found
                    continue
                pairs = [
                    (a, b)
                    for request_id, ids in expected.items()
                    for a, b in zip(ids, found[request_id], strict=True)
                ]
                yield {
                    "weights": weights, "temperature": temperature, "policy": policy, **guesses,
                    "identical": sum(a == b for a, b in pairs), "tokens": len(pairs),
                    **{key: summary["speculation"][key] for key in ("acceptance", "checked")},
                    "surplus_rows": summary["surplus_rows"],
                }  # fmt: skip
        del session


def speed(model: str, device: str, out: Path, repeats: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Decoding with forced acceptance beside decoding without guesses, in turn."""
    cases = []
    for inflight in (2, 4):
        for requests in (1, 8):
            cases.append((requests, None, inflight))
            cases += [(requests, chance, inflight) for count, chance in CASES if count == requests]
    configs = [
        config_of(
            model, "wcpb", requests, 512, tokens,
            None if chance is None else {"draft_loops": 2, "max_tokens": 3, "acceptance": chance}, inflight
        )
        for requests, chance, inflight in cases
    ]  # fmt: skip
    session = Session(configs, device)
    found: dict[int, list[dict[str, Any]]] = {}
    for repeat in range(repeats + 1):
        for at, run in enumerate(session.runs):
            path, summary, _ = execute(session, run, out / f"speed-{at}-{repeat}", plots=False)
            if repeat:
                found.setdefault(at, []).append({**summary, "limit": decode_limit(path)})
    for at, (requests, chance, inflight) in enumerate(cases):
        rates = [requests * 1000 / item["tpot_ms"]["mean"] for item in found[at]]
        guesses = [item.get("speculation") or {} for item in found[at]]
        yield {
            "requests": requests, "inflight": inflight, "forced_acceptance": chance,
            "tokens_per_s": median(rates), "all": rates,
            "limit_tokens_per_s": found[at][0]["limit"],
            "acceptance": guesses[0].get("acceptance"),
            "tokens_per_target_step": guesses[0].get("tokens_per_target_step"),
            "surplus_rows": found[at][0]["surplus_rows"], "busy": found[at][0]["gpu_busy_fraction"],
        }  # fmt: skip


def decode_limit(path: Path) -> float:
    """Tokens a second if every batch after the prompts took what bytes and FLOPs allow at least."""
    limit_ns = tokens = 0
    for batch in read_batches(path / "batches.csv"):
        if ":PREFILL" not in batch.ranges_text:
            limit_ns += int(batch.row.fields["limit_ns"])
            tokens += batch.ranges_text.count(":CODA:") + batch.ranges_text.count(":VERIFY:")
    return 1e9 * tokens / limit_ns if limit_ns else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="ouro-1.4b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each request")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, list[dict[str, Any]]] = {"speed": [], "identity": []}
    parts = {
        "speed": speed(args.model, args.device, args.out, args.repeats, args.tokens),
        "identity": identity(args.model, args.device, args.out, args.tokens // 2),
    }
    for name, rows in parts.items():
        for row in rows:
            print(json.dumps(row), flush=True)
            result[name].append(row)
            (args.out / "speculation.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
