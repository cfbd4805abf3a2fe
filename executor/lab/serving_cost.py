"""What a server costs, on one loaded model: `python -m executor.lab.serving_cost OUT`.

The same client drives the executor's server and, beside it, the twin; the executor's log is then run again as
a trace, without a server, and both logs are replayed. Tables: latencies that clients saw and that the engine
logged, HTTP's part of them, the twin's, and times of equal decode batches with and without the server.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from executor.clientele import HttpClients
from executor.run import execute
from executor.session import PlannedRun, Session
from policies.config.generation import read_generation
from policies.config.runconfig import load_config, parse_config
from results.batchlog import read_batches
from results.csvlog import Columns, read_rows
from results.identity import short_name
from results.load import load_run
from results.requestlog import read_requests
from results.rundir import BATCHES, REQUESTS
from workloads.serving.client import COLUMNS as CLIENT_COLUMNS
from workloads.serving.inbox import HTTP_COLUMNS
from workloads.serving.options import Place
from workloads.serving.server import Server, listen, settings_of
from workloads.serving.settings import Limits
from workloads.spec import LiveSpec, parse_workload
from workloads.workload import load_workload

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="serving_cost", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, default=ROOT / "sim/configs/serve.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rates", type=float, nargs="+", default=[8.0, 16.0])
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    config = load_config(options.config, options.set, {"kind": "live"})
    session = Session([config], options.device, is_served=True)
    run, shape = session.runs[0], session.runs[0].shape(session.shape)
    spec = parse_workload(config.workload, config.where)
    assert isinstance(spec, LiveSpec)
    twin_config = out / "twin.yaml"
    twin_config.write_text(json.dumps({**run.config.resolved}))  # JSON is YAML; with the blocks of this card
    generation = read_generation(config.model, shape)
    settings = settings_of(short_name(config.model), spec, shape, config.model, generation, config.sampling)
    place = Place("127.0.0.1", 0, Limits(), None)
    server = Server(place, listen(place))
    longest = min(config.scheduler.chunk_tokens, config.scheduler.max_num_batched_tokens)
    session.warm_up(longest, config, True)
    say(begun, "loaded and warm")
    twin = start(["sim", "serve", str(twin_config), "--port", "0", "--out", str(out / "twin"), "--no-plots"])
    twin_url = ready(twin)
    drive = threading.Thread(target=drive_both, args=(options, server.url, twin_url, shape.vocab_size))
    drive.start()
    served, _, tokens = execute(
        session, run, out / "served", plots=False, clients=HttpClients(server, settings, None)
    )
    drive.join()
    twin.send_signal(signal.SIGTERM)
    say(begun, "served")
    (out / "trace.csv").write_text("\n".join(trace_of(served)) + "\n")
    raw = {**run.config.resolved, "workload": {"kind": "trace", "path": str(out / "trace.csv")}}
    again = parse_config(raw, out, "trace")
    workload = load_workload(parse_workload(again.workload, "trace"), again.seed)
    plain, _, _ = execute(session, PlannedRun(again, workload), out / "plain", plots=False)
    say(begun, "run without a server")
    twin.wait(60)
    report = {
        "rates": rates(out, options.rates, options.requests),
        "decode": decode_times(served, plain),
        "replays": list(ThreadPoolExecutor(3).map(replayed, [served, plain, out / "twin"])),
        "requests": len(tokens),
    }
    (out / "report.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))
    return 0


def say(begun: float, what: str) -> None:
    print(f"{time.monotonic() - begun:6.1f} s: {what}", file=sys.stderr, flush=True)


def start(arguments: Sequence[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip


def ready(process: "subprocess.Popen[str]") -> str:
    """The URL that a server says when it listens; what else it says is passed on."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("serving "):
            threading.Thread(target=lambda: sys.stderr.writelines(process.stderr or ()), daemon=True).start()
            return line.split()[-1].removesuffix("/v1")
        sys.stderr.write(line)
    raise RuntimeError("the twin did not begin to listen")


def drive_both(options: argparse.Namespace, url: str, twin_url: str, vocab_size: int) -> None:
    """Drive both servers at once, then drain this one."""
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    common = ["--requests", str(options.requests), "--vocab-size", str(vocab_size)]
    common += ["--rates", *map(str, options.rates)]
    clients = [
        start(["workloads.serving.client", f"{base}/v1", "--out", str(options.out / f"{name}.csv"), *common])
        for name, base in (("client", url), ("twin-client", twin_url))
    ]
    for client in clients:
        _, errors = client.communicate()
        sys.stderr.write(errors)
    os.kill(os.getpid(), signal.SIGTERM)


def trace_of(path: Path) -> Iterable[str]:
    """The requests of a run as a plain trace."""
    yield "arrival_ns,prompt_tokens,output_tokens,max_tokens"
    for _, record, delivered in read_requests(path / REQUESTS):
        asked = record.request
        yield f"{asked.arrival_ns},{asked.prompt_tokens},{delivered},{asked.max_tokens}"


def rates(out: Path, wanted: Sequence[float], count: int) -> list[dict[str, Any]]:
    """Latencies at each rate: p50 and p99 that the client saw, that the engine logged, that the twin's client
    saw and the twin logged; HTTP's own part of time to first token and of the whole answer."""
    table = []
    clients = {name: read_client(out / f"{name}.csv") for name in ("client", "twin-client")}
    logs = {name: read_log(out / name) for name in ("served", "twin")}
    for at, rate in enumerate(wanted):
        row: dict[str, Any] = {"rate": rate, "requests": count}
        within = slice(at * count, (at + 1) * count)
        for name, found in (*clients.items(), *logs.items()):
            row[name] = {
                key: percentiles([value for item in found[within] for value in item[key]])
                for key in ("ttft_ms", "itl_ms", "e2e_ms", "http_ttft_ms", "http_e2e_ms")
                if key in found[0]
            }
        for client, log in (("client", "served"), ("twin-client", "twin")):
            row[f"{client} ttft p50 beyond the engine's, ms"] = round(
                row[client]["ttft_ms"]["p50"] - row[log]["ttft_ms"]["p50"], 3
            )
        row["twin to card, p50"] = {
            key: round(row["twin-client"][key]["p50"] / row["client"][key]["p50"] - 1, 4)
            for key in ("ttft_ms", "itl_ms", "e2e_ms")
        }
        table.append(row)
    return table


def read_client(path: Path) -> list[dict[str, list[float]]]:
    found = []
    for row in read_rows(path, Columns(CLIENT_COLUMNS, ())):
        sent_s, first_s, last_s = (float(row.fields[name]) for name in ("sent_s", "first_s", "last_s"))
        gaps_ms = list(map(float, row.fields["gaps_ms"].split()))
        found.append(
            {"ttft_ms": [1e3 * (first_s - sent_s)], "e2e_ms": [1e3 * (last_s - sent_s)], "itl_ms": gaps_ms}
        )
    return found


def read_log(path: Path) -> list[dict[str, list[float]]]:
    """The engine's latencies, and what HTTP adds: from a request's head to its arrival, and from a token to
    its sending."""
    found = []
    for row, record, _ in read_requests(path / REQUESTS):
        times, arrival_ns = record.token_ns, record.request.arrival_ns
        received_ns, first_ns, finished_ns = map(row.whole, HTTP_COLUMNS)
        found.append(
            {
                "ttft_ms": [(times[0] - arrival_ns) / 1e6],
                "e2e_ms": [(times[-1] - arrival_ns) / 1e6],
                "itl_ms": [(b - a) / 1e6 for a, b in pairwise(times)],
                "http_ttft_ms": [(first_ns - received_ns - times[0] + arrival_ns) / 1e6],
                "http_e2e_ms": [(finished_ns - received_ns - times[-1] + arrival_ns) / 1e6],
            }
        )
    return found


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{at}": round(float(np.percentile(values, at)), 3) for at in (50, 99)}


def decode_times(served: Path, plain: Path) -> dict[str, Any]:
    """Batches of decode rows alone, by shape: time on the device, and from one such batch's end to the next
    one's; the ratio of medians over the shapes that both runs have."""
    both = [shapes(path) for path in (served, plain)]
    common = [key for key in both[0] if len(both[0][key]) >= 10 and len(both[1].get(key, ())) >= 10]
    weights = np.array([min(len(found[key]) for found in both) for key in common], dtype=float)
    answer: dict[str, Any] = {"shapes": len(common), "batches": int(weights.sum())}
    for column, name in enumerate(("device", "step")):
        medians = np.array(
            [[np.median([item[column] for item in found[key]]) for key in common] for found in both]
        )
        answer[f"{name} us, served and plain"] = [
            round(float(row @ weights / weights.sum()) / 1e3, 2) for row in medians
        ]
        answer[f"{name} ratio"] = round(float((medians[0] @ weights) / (medians[1] @ weights)), 4)
    for path, name in ((served, "served"), (plain, "plain")):
        summary = load_run(path).summary
        answer[f"{name} select_us, host_us, busy"] = [
            summary["select_us"]["mean"], summary.get("host_us", {}).get("mean"), summary["gpu_busy_fraction"]
        ]  # fmt: skip
    return answer


def shapes(path: Path) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(device time, time since the end of the batch before) of decode batches after another one, in
    nanoseconds, by loops and rows."""
    found = defaultdict(list)
    before_ns: int | None = None
    for batch in read_batches(path / BATCHES):
        is_decode = "PREFILL" not in batch.ranges_text
        if is_decode and before_ns is not None and batch.stage == "RECURRENT":
            times = (batch.finished_ns - batch.started_ns, batch.finished_ns - before_ns)
            found[batch.loop_count, batch.rows].append(times)
        before_ns = batch.finished_ns if is_decode else None
    return dict(found)


def replayed(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sim", "replay", str(path)], cwd=ROOT, capture_output=True, text=True
    )
    return f"status {done.returncode}: {done.stdout.strip()[-200:]}{done.stderr.strip()[-200:]}"


if __name__ == "__main__":
    sys.exit(main())
