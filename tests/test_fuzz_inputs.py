"""Whatever a file holds, a command ends soon, in one of its statuses, with one line where the input is wrong.

Mutated configurations, sweeps, overrides, traces of every format, model files, profiles, `config.json`,
checkpoints, run directories and packs, drawn from a seed. `FUZZ_SECONDS` is how long each kind is tried (3 by
default; 50 makes ten minutes), `FUZZ_SEED` another sequence. A failure names its kind and number; the same
seed makes the same inputs.
"""

import contextlib
import copy
import io
import json
import math
import os
import resource
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import yaml
from results_runs import write_run
from synthetic_profile import write_profile

from policies.costs.models import DEVICES
from results.cli import main as results_main
from sim.cli import main as sim_main

SECONDS = float(os.environ.get("FUZZ_SECONDS", "3"))
SEED = os.environ.get("FUZZ_SEED", "0")
PATIENCE_S = 10
MAX_LINE = 400
MEMORY_BYTES = 16 << 30

CONFIG: dict[str, Any] = {
    "model": "ouro-tiny", "device": "h200", "policy": {"name": "wcpb", "mix_decode": True},
    "scheduler": {
        "max_num_seqs": 4, "max_num_batched_tokens": 64, "prefill_chunk_size": 16, "decode": "refill",
        "inflight": 2, "admission": "fcfs", "admission_scan_limit": 4, "min_coda_batch_size": 1,
    },
    "cache": {"block_size": 16, "num_blocks": 64, "allocation": "full", "preemption": "off"},
    "exit": {"mode": "gate", "threshold": 0.5, "loop_weights": [1, 2, 1, 1], "min_loops": 1},
    "workload": {
        "kind": "synthetic", "num_requests": 5, "arrival": {"process": "gamma", "rate": 900, "cv": 1.5},
        "prompt_tokens": {"distribution": "lognormal", "median": 30, "sigma": 0.5, "max": 60},
        "output_tokens": [3, 1], "shared_prefix": {"groups": 2, "tokens": 16}, "patience_ms": 900,
    },
    "sampling": {"temperature": 0.5, "top_k": 3},
    "seed": 0,
}  # fmt: skip
TRACE_KEYS: dict[str, Any] = {
    "kind": "trace", "path": "t.csv", "format": "auto", "limit": 4, "repeat": 2, "jitter_s": 0.1,
    "time_scale": 1.0, "timestamp_unit": "auto", "max_tokens": 8, "max_context": 100, "concurrency": 2,
    "start_s": 0, "end_s": 900.0, "columns": None, "rate": None,
}  # fmt: skip
TRACES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,37,4\n"
    "2023-11-16 18:15:47,9,1\n",
    "mooncake": '{"timestamp": 0, "input_length": 37, "output_length": 4, "hash_ids": [0]}\n'
    '{"timestamp": 20, "input_length": 600, "output_length": 2, "hash_ids": [0, 7]}\n',
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens\n1,a,20,2\n4,a,30,3\n",
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.1,37,5\n0.2,1,20\n",
    "plain": "arrival_s,prompt_tokens,output_tokens,max_tokens,priority,cancel_ns,exit_loops\n"
    "0,8,3,,1,,2 3\n0.5,9,3,4,-1,900000000,1\n",
}
WINDOWS = "0,0.02,1.5,Gamma,0.44,22.0\n600,0.01,1.2,Weibull,0.5,30\n1200,0,0,,,\n"
HISTOGRAMS = {"0": {"input_tokens": "{50: 0.25, 51: 0.75}", "output_tokens": "{2: 1.0}"}}
OURO = {
    "model_type": "ouro", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "total_ut_steps": 4, "max_position_embeddings": 4096, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32", "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "early_exit_threshold": 1.0,
    "layer_types": ["full_attention"], "tie_word_embeddings": False,
}  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 0.5, -0.5, 1e-300, 1e300, math.inf, math.nan,
    2**31, 2**62, 2**63, 2**64, 10**12, 10**45, "", " ", "1", "nan", "x" * 5000, "a\0b", "\ud800", "é\n\n",
    "~nobody/x", "/dev/zero", "/", ".", "2026-13-01", [], {}, [1], [[1]], [0] * 300,
    {"a": 1}, {"name": "wcpb"}, {"kind": "trace"}, {"kind": "preset"},
)  # fmt: skip
"""Values for any key. None of them is right somewhere and means hours of work there."""
SNIPPETS = (
    "a: 2026-13-01\n", "0x_", "!!int x", "!!python/object:os.system {}", "1:30", "010", "9" * 5000,
    "&a [*a, *a]", "*x", "\0", "\ufeff", "\ud800", "[" * 100_000, "{a: " * 3000, '{"a":' * 100_000,
    "- " * 5000, "? ", "<<: 1\n", "\n" * 50, ",", '"', "'", "}", "]", ":", "#", "\r", "1e999", "NaN",
    "-", "\t", "\x85", "=", "|", "%", "@", "\u2028",
    "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d]\n",
)  # fmt: skip


class Hang(BaseException):
    """A command took too long."""


def ends(main: Callable[[Sequence[str]], int], *arguments: object) -> str | None:
    """What is wrong with the way in which a command ends, None when nothing is."""
    out, err = io.StringIO(), io.StringIO()

    def too_long(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(PATIENCE_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status = main([str(argument) for argument in arguments])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "site-packages" not in frame.filename][-1]
        return f"{type(error).__name__} at {Path(ours.filename).name}:{ours.lineno} {str(error)[:80]!r}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    text = err.getvalue()
    if status not in (0, 1, 2, 130):
        return f"status {status}"
    if "Traceback" in text:
        return f"a traceback, status {status}: {text[-200:]!r}"
    if status == 2 and (text.count("\n") != 1 or len(text) > MAX_LINE):
        return f"status 2 with {text.count(chr(10))} lines, {len(text)} characters: {text[:120]!r}"
    try:
        (text + out.getvalue()).encode()
    except UnicodeEncodeError:
        return f"text that cannot be printed: {text[:120]!r}"
    return None


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a document."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def mutated(document: Any, random: Random) -> Any:
    """A copy with one or two values replaced, removed, or joined by others."""
    document = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        found = list(places(document))
        if not found:
            return document
        container, key = random.choice(found)
        kind = random.random()
        if kind < 0.75:
            container[key] = copy.deepcopy(random.choice(HOSTILE))
        elif kind < 0.85:
            del container[key]
        elif isinstance(container, dict):
            container[random.choice((f"{key}x", "kind", "", "a.b", "x" * 500))] = random.choice(HOSTILE)
    return document


def mangled(text: str, random: Random) -> bytes:
    """A text with pieces removed, repeated, moved, replaced by bytes, or by what parsers choke on."""
    for _ in range(random.choice((1, 1, 2, 4))):
        at, to = sorted(random.randrange(len(text) + 1) for _ in range(2))
        to = min(to, at + random.choice((1, 3, 20, 200)))
        kind = random.randrange(6)
        if kind == 0:
            text = text[:at] + text[to:]
        elif kind == 1:
            text = text[:to] + text[at:]
        elif kind == 2:
            text = text[:at] + random.choice(SNIPPETS) + text[at:]
        elif kind == 3:
            text = text[:at] + random.choice(SNIPPETS) + text[to:]
        elif kind == 4:
            text = text[:at] + str(random.choice(HOSTILE)) + text[to:]
        else:
            text = text[:at]
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(random.choice((0, 0, 0, 1, 8)) if data else 0):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


def document_bytes(document: Any, random: Random) -> bytes:
    """A document mutated as values or as text."""
    if random.random() < 0.6:
        return json.dumps(mutated(document, random)).encode("utf-8", "surrogatepass")
    text = yaml.safe_dump(document, sort_keys=False) if random.random() < 0.5 else json.dumps(document)
    return mangled(text, random)


Case = Callable[[Path, Random], str | None]


def config_case(folder: Path, random: Random) -> str | None:
    """A whole configuration."""
    (folder / "t.csv").write_text(random.choice(list(TRACES.values())))
    config = CONFIG if random.random() < 0.6 else {**CONFIG, "workload": TRACE_KEYS, "exit": {}}
    (folder / "c.yaml").write_bytes(document_bytes(config, random))
    return ends(sim_main, "run", folder / "c.yaml", "--no-plots", "--out", folder / "run")


def override_case(folder: Path, random: Random) -> str | None:
    """`--set` on the command line."""
    (folder / "t.csv").write_text(TRACES["plain"])
    config = random.choice((CONFIG, {**CONFIG, "workload": TRACE_KEYS, "exit": {}}))
    (folder / "c.yaml").write_text(json.dumps(config))
    keys = [".".join(map(str, path)) for path in paths_of(config)]
    sets = []
    for _ in range(random.choice((1, 1, 2))):
        value = random.choice((*HOSTILE, *SNIPPETS))
        text = value if isinstance(value, str) else json.dumps(value)
        key = random.choice((*keys, "", "a" * 3000, ".".join("a" * 900), "..", "seed.x"))
        sets += ["--set", random.choice((f"{key}={text}", text, f"{key}{text}"))]
    return ends(sim_main, "run", folder / "c.yaml", *sets, "--no-plots", "--out", folder / "run")


def paths_of(value: Any, *outer: Any) -> Iterator[tuple[Any, ...]]:
    for key, item in value.items():
        yield (*outer, key)
        if isinstance(item, dict):
            yield from paths_of(item, *outer, key)


def sweep_case(folder: Path, random: Random) -> str | None:
    """A grid."""
    grid = {"policy.name": ["wcpb", "atomic"], "scheduler.prefill_chunk_size": [16, None]}
    (folder / "s.yaml").write_bytes(document_bytes({"base": CONFIG, "grid": grid}, random))
    with mock.patch("results.sweep.write_sweep", return_value=[]):  # seconds of pictures of every sweep
        return ends(sim_main, "sweep", folder / "s.yaml", "--jobs", "1", "--out", folder / "out")


def trace_case(folder: Path, random: Random) -> str | None:
    """A trace of some format, with a workload section that is right for it."""
    kind = random.choice((*TRACES, "servegen"))
    workload: dict[str, Any] = {"kind": "trace", "path": "t.csv"}
    if kind == "servegen":
        workload |= {"dataset": "d.json", "limit": 9}
        (folder / "t.csv").write_bytes(
            mangled(WINDOWS, random) if random.random() < 0.5 else WINDOWS.encode()
        )
        (folder / "d.json").write_bytes(document_bytes(HISTOGRAMS, random))
    elif kind == "mooncake" and random.random() < 0.5:
        rows = [mutated(json.loads(line), random) for line in TRACES[kind].splitlines()]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "t.csv").write_bytes(text.encode("utf-8", "surrogatepass"))
    elif random.random() < 0.4:
        head, *rows = (line.split(",") for line in TRACES[kind].splitlines())
        rows[0][random.randrange(len(rows[0]))] = str(random.choice(HOSTILE)).replace("\0", "")
        text = "\n".join(",".join(row) for row in (head, *rows))
        (folder / "t.csv").write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        (folder / "t.csv").write_bytes(mangled(TRACES[kind], random))
    (folder / "c.yaml").write_text(json.dumps({**CONFIG, "workload": workload, "exit": {}}))
    return ends(sim_main, "run", folder / "c.yaml", "--no-plots", "--out", folder / "run")


def model_file_case(folder: Path, random: Random) -> str | None:
    """A latency model."""
    document = json.loads((DEVICES / "h200.json").read_text())
    (folder / "m.json").write_bytes(document_bytes(document, random))
    if random.random() < 0.5:
        return ends(
            sim_main, "explain", folder / "m.json", "--batch", "0:RECURRENT:0:1023:1 1:RECURRENT:2:64:16"
        )
    config = {**CONFIG, "model": "ouro-1.4b", "device": "m.json"}
    (folder / "c.yaml").write_text(json.dumps(config))
    return ends(sim_main, "run", folder / "c.yaml", "--no-plots", "--out", folder / "run")


def explain_case(folder: Path, random: Random) -> str | None:
    """The ranges of a batch on the command line."""
    text = mangled("0:RECURRENT:0:1023:1 1:PREFILLING_RECURRENT:2:64:16", random).decode(
        "utf-8", "surrogateescape"
    )
    loops = ["--loops", random.choice(("0", "4", "-1", "9" * 5000))] if random.random() < 0.3 else []
    return ends(sim_main, "explain", "h200", "--batch", text, *loops)


def profile_case(folder: Path, random: Random) -> str | None:
    """A profile to fit."""
    source = folder.parent / "profile.csv"
    if not source.exists():
        write_profile(source)
    (folder / "p.csv").write_bytes(mangled(source.read_text(), random))
    return ends(sim_main, "fit", folder / "p.csv", "--out", folder / "m.json")


def hf_config_case(folder: Path, random: Random) -> str | None:
    """A Hugging Face `config.json`, in both worlds' common reader."""
    (folder / "config.json").write_bytes(document_bytes(OURO, random))
    (folder / "c.yaml").write_text(json.dumps({**CONFIG, "model": ".", "exit": {}}))
    return ends(sim_main, "run", folder / "c.yaml", "--no-plots", "--out", folder / "run")


def checkpoint_case(folder: Path, random: Random) -> str | None:
    """A checkpoint that the executor loads."""
    pytest.importorskip("torch")
    save = pytest.importorskip("safetensors.torch").save_file
    import torch

    from executor.cli import main as executor_main
    from executor.model.weights import named_tensors, random_weights
    from policies.core.models.shape import OURO_TINY

    torch.set_num_threads(1)
    source = folder.parent / "model.safetensors"
    if not source.exists():
        weights = random_weights(OURO_TINY, 0, torch.float32, torch.device("cpu"))
        save({name: tensor.clone() for name, tensor in named_tensors(OURO_TINY, weights)}, source)
    data = bytearray(source.read_bytes())
    size = int.from_bytes(data[:8], "little")
    kind = random.randrange(5)
    if kind == 0:
        head = document_bytes(json.loads(data[8 : 8 + size]), random)
        data = bytearray(len(head).to_bytes(8, "little") + head + data[8 + size :])
    elif kind == 1:
        del data[random.randrange(len(data)) :]
    elif kind == 2:
        data[random.randrange(8)] = random.randrange(256)
    elif kind == 3:
        at = random.randrange(8 + size, len(data) - 4) & ~3
        data[at : at + 4] = b"\xff\xff\xff\x7f"
    (folder / "model.safetensors").write_bytes(data)
    index = {
        "weight_map": dict.fromkeys(list(json.loads(source.read_bytes()[8 : 8 + size])), "model.safetensors")
    }
    if kind == 4:
        (folder / "model.safetensors.index.json").write_bytes(document_bytes(index, random))
    (folder / "config.json").write_text(json.dumps(OURO))
    workload = {"kind": "synthetic", "num_requests": 1, "prompt_tokens": 2, "output_tokens": 1}
    (folder / "c.yaml").write_text(json.dumps({**CONFIG, "model": ".", "exit": {}, "workload": workload}))
    arguments = ("run", folder / "c.yaml", "--device", "cpu", "--no-plots", "--out", folder / "run")
    return ends(executor_main, *arguments)


def run_case(folder: Path, random: Random) -> str | None:
    """A run directory with one file changed."""
    source = folder.parent / "whole"
    if not source.exists():
        write_run(source)
    shutil.copytree(source, folder / "run")
    name = random.choice(("summary.json", "summary.json", "config.yaml", "requests.csv", "batches.csv"))
    path = folder / "run" / name
    text = path.read_text()
    if name == "summary.json":
        path.write_bytes(document_bytes(json.loads(text), random))
    elif name == "config.yaml":
        first, _, rest = text.partition("\n")
        path.write_bytes(first.encode() + b"\n" + document_bytes(yaml.safe_load(rest), random))
    else:
        path.write_bytes(mangled(text, random))
    command = random.choice(("report", "plot", "compare", "replay"))
    if command == "replay":
        return ends(sim_main, "replay", folder / "run")
    if command == "compare":
        return ends(results_main, "compare", source, folder / "run", "--out", folder / "out")
    out = folder / ("r.html" if command == "report" else "p.png")
    return ends(results_main, command, folder / "run", "--out", out)


def pack_case(folder: Path, random: Random) -> str | None:
    """A pack with bytes changed, or cut."""
    source = folder.parent / "packed.tar.xz"
    if not source.exists():
        write_run(folder.parent / "to-pack")
        assert ends(results_main, "pack", folder.parent / "to-pack", "--out", source) is None
    data = bytearray(source.read_bytes())
    for _ in range(random.choice((0, 1, 1, 4))):
        data[random.randrange(len(data))] = random.randrange(256)
    if random.random() < 0.4:
        del data[random.randrange(len(data)) :]
    data += random.choice((b"", b"", bytes(data), b"x", bytes(600)))
    (folder / "p.tar.xz").write_bytes(data)
    if random.random() < 0.5:
        return ends(results_main, "unpack", folder / "p.tar.xz", "--out", folder / "out")
    return ends(sim_main, "replay", folder / "p.tar.xz")


CASES: dict[str, Case] = {
    name.removesuffix("_case"): case for name, case in list(globals().items()) if name.endswith("_case")
}


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("kind", CASES)
def test_a_command_ends_in_one_of_its_statuses_whatever_its_input_holds(
    tmp_path: Path, bounded_memory: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict[str, str] = {}
    deadline = time.monotonic() + SECONDS
    number = 0
    while number == 0 or time.monotonic() < deadline:
        folder = tmp_path / str(number)
        folder.mkdir()
        fault = CASES[kind](folder, Random(f"{SEED}/{kind}/{number}"))
        if fault is not None:
            found.setdefault(fault, f"{kind} {number}: {fault}")
        shutil.rmtree(folder, ignore_errors=True)
        number += 1
    print(f"{kind}: {number} inputs")
    assert not found, "\n".join(found.values())


@pytest.mark.skipif("FUZZ_ONE" not in os.environ, reason="FUZZ_ONE='kind number' shows one input again")
def test_one_input_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, number = os.environ["FUZZ_ONE"].split()
    monkeypatch.chdir(tmp_path)
    (tmp_path / number).mkdir()
    fault = CASES[kind](tmp_path / number, Random(f"{SEED}/{kind}/{number}"))
    print(tmp_path / number)
    assert fault is None
