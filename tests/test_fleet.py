"""A fleet is its engines and nothing between them but a door: each replica is a plain run, and what queueing
theory says of one server is true of each."""

import io
import json
import os
from dataclasses import replace
from math import sqrt
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Any

import pytest
from test_sim_backend import ConstantCost
from worlds import spelled

from policies.config.overrides import apply_overrides
from policies.config.runconfig import RunConfig, parse_config
from policies.core.engine.runlog import RequestRecord
from policies.core.seam.request import Request, Status
from policies.costs.latency import HostLoop
from policies.registry import POLICIES
from policies.routing.registry import ROUTERS
from policies.routing.router import Load
from results.find import find_runs, replicas_of
from results.load import load_run
from results.requestlog import request_row
from sim.cli import main
from sim.fleet import FleetSimulation
from sim.replay import replay
from sim.run import simulate
from workloads.workload import Workload

BASE: dict[str, Any] = {
    "model": "ouro-tiny",
    "scheduler": {"max_num_seqs": 3, "max_num_batched_tokens": 64, "prefill_chunk_size": 16},
    "workload": {
        "kind": "synthetic", "num_requests": 40, "arrival": {"process": "poisson", "rate": 900},
        "prompt_tokens": [70, 5, 200, 33], "output_tokens": [4, 30, 12],
    },
}  # fmt: skip
HANG_UPS = "workload.patience_ms={distribution: uniform, min: 1, max: 40}"
CLOSED = "workload.arrival={process: closed, concurrency: 5}"
FILES = ("config.yaml", "batches.csv", "requests.csv")


def config_of(*overrides: str, base: dict[str, Any] = BASE) -> RunConfig:
    return parse_config(apply_overrides(base, overrides), Path("."), "test")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "overrides", [(), (HANG_UPS,), (CLOSED, HANG_UPS), (CLOSED, "measure.skip_requests=7", "slo.ttft_ms=5")]
)
def test_a_fleet_of_one_is_byte_for_byte_a_plain_run(
    tmp_path: Path, policy: str, overrides: tuple[str, ...]
) -> None:
    base = {**BASE, "policy": spelled(policy)}
    plain, one = config_of(*overrides, base=base), config_of(*overrides, "fleet.replicas=1", base=base)
    expected = simulate(plain, tmp_path / "plain", plots=False)[1]
    whole = simulate(one, tmp_path / "fleet", plots=False)[1]
    (replica,) = replicas_of(tmp_path / "fleet")
    for name in FILES:
        assert (replica / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert (tmp_path / "fleet" / "requests.csv").read_bytes() == (replica / "requests.csv").read_bytes()
    own = json.loads((replica / "summary.json").read_text())
    del expected["input_sha256"]
    assert own == expected
    assert {**whole, "config_sha256": "", "fleet": ""} == {
        **expected, "config_sha256": "", "fleet": "", "input_sha256": whole["input_sha256"]
    }  # fmt: skip


def logged(config: RunConfig, skips: bool) -> tuple[list[str], list[list[tuple[object, ...]]], int]:
    """All that the engines of a fleet write, and how many batches they took in stretches."""
    fleet = FleetSimulation.prepare(config)
    texts = [io.StringIO() for _ in fleet.parts]
    ended: list[list[RequestRecord]] = [[] for _ in fleet.parts]
    engines = fleet.engines(texts, [item.append for item in ended])
    fleet.run(engines, skips=skips)
    for engine in engines:
        engine.scheduler.check_drained()
    rows = [[request_row(record) for record in item] for item in ended]
    return [text.getvalue() for text in texts], rows, sum(engine.num_repeated for engine in engines)


@pytest.mark.parametrize("router", ROUTERS)
def test_stretches_are_taken_in_a_fleet_and_change_no_byte(router: str) -> None:
    repeated = 0
    for seed in range(int(os.environ.get("RANDOM_FLEETS", "3"))):
        chance = Random(f"{router} {seed}")
        config = config_of(
            f"seed={seed}",
            f"fleet={{replicas: {chance.randint(2, 4)}, router: {router}}}",
            f"policy={chance.choice(['atomic', 'split', 'mixed', 'wcpb'])}",
            f"scheduler.inflight={chance.randint(1, 4)}",
            f"workload.arrival.rate={chance.choice([200, 2000])}",
            *([CLOSED] if chance.random() < 0.3 else []),
            *([HANG_UPS] if chance.random() < 0.5 else []),
        )
        *one_by_one, none = logged(config, skips=False)
        *at_once, count = logged(config, skips=True)
        assert one_by_one == at_once and none == 0
        repeated += count
    assert repeated > 100


@pytest.mark.parametrize("overrides", [(HANG_UPS,), (CLOSED,), (CLOSED, HANG_UPS)])
@pytest.mark.parametrize("router", ROUTERS)
def test_every_replica_replays_and_together_they_served_each_request_once(
    tmp_path: Path, router: str, overrides: tuple[str, ...]
) -> None:
    config = config_of(*overrides, f"fleet={{replicas: 3, router: {router}}}", "policy=split")
    path, summary = simulate(config, tmp_path / "fleet", plots=False)
    served: list[str] = []
    for replica in replicas_of(path):
        outcome = replay(replica)
        assert outcome.difference is None and outcome.num_batches
        served += [
            line.partition(",")[0] for line in (replica / "requests.csv").read_text().split("\n")[1:-1]
        ]
    lines = (path / "requests.csv").read_text().split("\n")[1:-1]
    assert sorted(map(int, served)) == sorted(int(line.partition(",")[0]) for line in lines) == [*range(40)]
    arrivals = [int(line.split(",")[1]) for line in lines]
    assert arrivals == sorted(arrivals)
    own = [load_run(replica).summary for replica in replicas_of(path)]
    for key in ("num_requests", "num_finished", "num_cancelled", "output_tokens", "num_batches",
                "recurrent_invocations", "peak_kv_blocks"):  # fmt: skip
        assert summary[key] == sum(item[key] for item in own)
    assert [run.path for run in find_runs([tmp_path])[0]] == [path]


def test_the_imbalance_is_the_most_that_one_replica_had_over_the_mean(tmp_path: Path) -> None:
    config = config_of("workload.num_requests=7", "fleet.replicas=3")
    summary = simulate(config, tmp_path / "fleet", plots=False)[1]
    assert [item["num_requests"] for item in summary["fleet"]["by_replica"]] == [3, 2, 2]
    assert summary["fleet"]["imbalance"]["requests"] == 9 / 7


def test_replicas_may_have_devices_of_their_own_and_the_larger_takes_more(tmp_path: Path) -> None:
    config = config_of(
        "model=ouro-1.4b", "workload.arrival.rate=20", "cache.num_blocks=4096",
        "fleet={devices: [h200, a100-seed], router: least_loaded}",
    )  # fmt: skip
    path, summary = simulate(config, tmp_path / "fleet", plots=False)
    h200, a100 = (load_run(replica).summary for replica in replicas_of(path))
    assert (summary["device"], h200["device"], a100["device"]) == ("h200+a100-seed", "h200", "a100-seed")
    assert h200["num_requests"] > a100["num_requests"] > 0


def test_hosts_of_a_fleet_vary_apart() -> None:
    config = config_of("fleet.replicas=2", "workload.arrival={process: burst}", "workload.prompt_tokens=40")
    (first, second), _, _ = logged(config, skips=True)
    assert first.split("\n")[1] != second.split("\n")[1]


class FixedService:
    """Servers that serve one request at a time, each in two batches of half a millisecond."""

    service_ns = 1_000_000

    config = config_of(
        "policy=atomic", "scheduler.max_num_seqs=1",
        "scheduler.inflight=1", "scheduler.prefill_chunk_size=64", "workload.prompt_tokens=64",
        "workload.output_tokens=1",
    )  # fmt: skip

    def run(self, arrivals: list[int], replicas: int, router: str, seed: int) -> list[RequestRecord]:
        raw = {**self.config.resolved, "seed": seed, "fleet": {"replicas": replicas, "router": router}}
        requests = tuple([Request(at, arrival_ns, 64, 1) for at, arrival_ns in enumerate(arrivals)])
        workload = Workload("fixed", requests, _One())
        fleet = FleetSimulation.prepare(parse_config(raw, Path("."), "test"), workload)
        cost = ConstantCost(self.service_ns // 2, 0, 0, HostLoop())
        fleet = replace(fleet, parts=tuple([replace(part, latency=cost) for part in fleet.parts]))
        ended: list[RequestRecord] = []
        fleet.run(fleet.engines([None] * replicas, [ended.append] * replicas))
        return sorted(ended, key=lambda record: record.request.request_id)

    def waits(self, load: float, replicas: int, router: str, seed: int, count: int) -> list[int]:
        """Nanoseconds until each of `count` Poisson arrivals, which keep each of `replicas` servers busy for
        `load` of the time, is served."""
        arrivals = self.arrivals(load * replicas, seed, count)
        records = self.run(arrivals, replicas, router, seed)
        assert {record.status for record in records} == {Status.FINISHED}
        return [(record.finished_ns or 0) - record.request.arrival_ns - self.service_ns for record in records]

    def arrivals(self, load: float, seed: int, count: int) -> list[int]:
        chance, at_ns, arrivals = Random(seed), 0.0, []
        for _ in range(count):
            at_ns += chance.expovariate(load / self.service_ns)
            arrivals.append(round(at_ns))
        return arrivals


class _One:
    def output_tokens(self, request_id: int) -> int:
        return 1


@pytest.fixture(scope="module")
def fixed() -> FixedService:
    return FixedService()


@pytest.mark.parametrize(("replicas", "router"), [(1, "round_robin"), (2, "random")])
def test_the_mean_wait_is_that_of_an_m_d_1_queue(fixed: FixedService, replicas: int, router: str) -> None:
    """Pollaczek and Khinchine: load / (2 (1 - load)) services. The interval is that of the mean of 10 runs,
    at 99 % (Student's t with 9 degrees of freedom: 3.25)."""
    load = 0.5
    waits = [mean(fixed.waits(load, replicas, router, seed, 250 * replicas)[50:]) for seed in range(10)]
    expected = fixed.service_ns * load / (2 * (1 - load))
    radius = 3.25 * stdev(waits) / sqrt(len(waits))
    assert radius < 0.3 * expected
    assert abs(mean(waits) - expected) < radius


def test_servers_in_turn_are_one_queue_before_all_to_the_nanosecond(fixed: FixedService) -> None:
    """Where every service is alike, a request that takes its turn gets the server that is free first."""
    arrivals, free_ns = fixed.arrivals(0.9 * 3, 5, 300), [0, 0, 0]
    expected = []
    for arrival_ns in arrivals:
        start_ns = max(free_ns.pop(0), arrival_ns)
        free_ns = sorted([*free_ns, start_ns + fixed.service_ns])
        expected.append(start_ns - arrival_ns)
    assert fixed.waits(0.9, 3, "round_robin", 5, 300) == expected and max(expected) > fixed.service_ns


def test_whoever_looks_at_the_load_waits_less_than_chance(fixed: FixedService) -> None:
    waits = {name: mean(fixed.waits(0.8, 4, name, 1, 800)) for name in ROUTERS}
    for name in ("round_robin", "least_loaded", "least_kv", "prefix_affinity"):
        assert waits[name] < 0.5 * waits["random"]


def asked(*content_ids: int, prompt_tokens: int = 64) -> Request:
    return Request(0, 0, prompt_tokens, 4, 0, content_ids, 16)


def loads(*requests: int, kv: tuple[int, ...] = ()) -> list[Load]:
    kv = kv or tuple(100 * count for count in requests)
    return [Load(count, positions, 1000) for count, positions in zip(requests, kv, strict=True)]


def test_what_each_router_looks_at() -> None:
    turns = ROUTERS["round_robin"]().chooser(3, 0)
    assert [turns(asked(), loads(9, 0, 0)) for _ in range(4)] == [0, 1, 2, 0]
    queue = ROUTERS["least_loaded"]().chooser(3, 0)
    seen = (loads(3, 1, 2), loads(1, 1, 1), loads(2, 2, 2, kv=(9, 8, 8)))
    assert [queue(asked(), item) for item in seen] == [1, 0, 1]
    room = ROUTERS["least_kv"]().chooser(2, 0)
    assert room(asked(), [Load(1, 500, 1000), Load(9, 500, 2000)]) == 1
    chance = [ROUTERS["random"]().chooser(5, seed) for seed in (1, 1, 2)]
    drawn = [[choose(asked(), loads(0, 0, 0, 0, 0)) for _ in range(40)] for choose in chance]
    assert drawn[0] == drawn[1] != drawn[2] and set(drawn[0]) == set(range(5))


def test_a_prompt_goes_where_its_beginning_has_been_unless_that_one_leads_by_too_much() -> None:
    choose = ROUTERS["prefix_affinity"](max_lead=2, memory=6).chooser(3, 0)  # type: ignore[call-arg]
    assert choose(asked(1, 2, 3, 4), loads(1, 0, 0)) == 1
    assert choose(asked(1, 2, 9), loads(0, 2, 1)) == 1
    assert choose(asked(1, 2, 9), loads(0, 3, 1)) == 0
    assert choose(asked(1, 2, 3, 4), loads(2, 2, 0)) == 1  # its whole beginning, where 0 has two spans of it
    assert choose(asked(8, 2, 3, 4), loads(2, 2, 0)) == 2
    for content in range(20, 24):
        assert choose(asked(content, content), loads(5, 0, 5)) == 1
    assert choose(asked(1, 2, 3, 4), loads(0, 1, 2)) == 0  # 1 has forgotten it


def test_prefixes_are_found_more_often_where_they_are_sent_to_one_replica(tmp_path: Path) -> None:
    rates = {}
    for router in ("round_robin", "prefix_affinity"):
        config = config_of(
            "cache.prefix_caching=true", "workload.shared_prefix={groups: 8, tokens: 64}",
            "workload.prompt_tokens=100", f"fleet={{replicas: 4, router: {router}}}",
        )  # fmt: skip
        rates[router] = simulate(config, tmp_path / router, plots=False)[1]["prefix_hit_rate"]
    assert rates["prefix_affinity"] > 1.3 * rates["round_robin"]


def test_a_sweep_has_replicas_as_an_axis_and_a_finished_fleet_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.yaml"
    grid = {
        "fleet.replicas": [1, 2],
        "fleet.router": ["least_kv", {"name": "prefix_affinity", "max_lead": 1}],
    }
    path.write_text(json.dumps({"base": {**BASE, "fleet": {"replicas": 9}}, "grid": grid}))
    arguments = ["sweep", str(path), "--jobs", "1", "--out", str(tmp_path / "out"), "--log", "requests"]
    assert main(arguments) == 0
    assert "replicas=2" in capsys.readouterr().out
    header, *rows = (tmp_path / "out" / "sweep.csv").read_text().strip().split("\n")
    assert len(rows) == 4 and "axis.fleet.replicas" in header and "fleet.imbalance.requests" in header
    assert main(arguments) == 0
    assert "4 of 4 cells are finished already" in capsys.readouterr().err


def test_the_command_leaves_the_table_the_picture_and_a_directory_that_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "run.yaml", tmp_path / "out"
    path.write_text(json.dumps(BASE))
    assert main(["run", str(path), "--set", "fleet={replicas: 2, router: random}", "--out", str(out)]) == 0
    assert "replica 1" in capsys.readouterr().out
    assert (out / "plots" / "replicas.png").stat().st_size > 10_000
    assert main(["replay", str(out)]) == 0
    assert capsys.readouterr().out.count("all equal") == 2
    assert main(["run", str(path), "--set", "fleet.replicas=1", "--no-plots", "--out", str(out)]) == 0
    assert [replica.name for replica in replicas_of(out)] == ["0"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("fleet.replicas=0", "fleet.replicas: 0, expected at least 1"),
        (
            "fleet={replicas: 2, router: rr}",
            "fleet.router.name: unknown router 'rr', expected one of round_robin,",
        ),
        ("fleet={router: random}", "names neither replicas nor devices"),
        ("fleet={replicas: 3, devices: [h200, h200]}", "2 of them for 3 replicas"),
        ("fleet={devices: [h200, h300]}", "h300"),
        ("fleet={replicas: 2, router: {name: random, max_lead: 3}}", "unknown key 'fleet.router.max_lead'"),
        ("fleet={replicas: 2, router: {name: prefix_affinity, max_lead: -1}}", "expected at least 0"),
        ("fleet={replicas: 2, routers: random}", "did you mean 'router'?"),
        ("fleet=4", "expected a mapping with replicas or devices"),
    ],
)
def test_a_wrong_fleet_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(BASE))
    assert main(["run", str(path), "--set", override, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and len(error) < 400
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["serve", "hindsight"])
def test_commands_that_run_one_engine_refuse_a_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path, more = tmp_path / "config.yaml", ["--set", "fleet.replicas=2"]
    config: dict[str, Any] = BASE
    if command == "serve":
        config, more = {**BASE, "workload": {"kind": "live"}}, [*more, "--port", "0"]
    else:
        base = {key: value for key, value in BASE.items() if key != "workload"} | {"fleet": {"replicas": 2}}
        sized = {"policy": {"name": "slo", "model": "h200"}}
        config = {
            "base": base, "traffic": {"a": {"workload": BASE["workload"]}}, "loads": [1.0], "sized": sized,
            "objectives": [{"ttft_ms": 500, "itl_ms": 20}], "fixed": {"policy.name": ["wcpb"]},
        }  # fmt: skip
        more = ["--out", str(tmp_path / "out")]
    path.write_text(json.dumps(config))
    assert main([command, str(path), *more]) == 2
    error = capsys.readouterr().err
    assert "fleet" in error and error.count("\n") == 1 and len(error) < 400
