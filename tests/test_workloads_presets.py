"""The shipped presets: their exact shapes, and that the reconstructed mixes schedule as the seed
published."""

from collections import Counter, deque

import pytest

from policies.core.engine.engine import Engine
from policies.core.engine.runlog import RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.models.shape import OURO_1_4B
from policies.core.seam.clients import Clients
from policies.core.seam.events import Command, Completion, Event, Submit, Tick
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.registry import POLICIES
from workloads.presets import preset_names, read_preset
from workloads.spec import PresetSpec, parse_workload
from workloads.workload import Workload, load_workload


def preset(name: str, **keys: object) -> Workload:
    return load_workload(parse_workload({"kind": "preset", "name": name, **keys}, "test"), 0)


def prompt_counts(workload: Workload) -> Counter[int]:
    return Counter(request.prompt_tokens for request in workload.requests)


def test_every_preset_of_the_contract_ships_and_loads() -> None:
    serving = {
        f"seed-{profile}-{lengths}"
        for profile in ("serial", "concurrent", "arrival")
        for lengths in ("fixed", "variable")
    }
    assert set(preset_names()) == {"seed-4x8064", "seed-32-mixed", "seed-128-mixed", "chat", *serving}
    for name in preset_names():
        assert len(preset(name).requests) == read_preset(name)["workload"]["num_requests"]
        assert preset(name).name == name


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("seed-4x8064", {8064: 4}),
        ("seed-32-mixed", {8192: 2, 3584: 1, 768: 4, 512: 6, 256: 17, 128: 2}),
        ("seed-128-mixed", {5120: 4, 3584: 2, 256: 5, 160: 3, 64: 18, 48: 5, 32: 34, 16: 57}),
    ],
)
def test_prompt_mixes_arrive_together_and_ask_for_one_token(name: str, prompts: dict[int, int]) -> None:
    workload = preset(name)
    assert prompt_counts(workload) == prompts
    assert {
        (r.arrival_ns, r.max_tokens, workload.oracle.output_tokens(r.request_id)) for r in workload.requests
    } == {(0, 1, 1)}
    assert workload.concurrency is None
    assert any("reconstruction" in note for note in workload.notes) == ("mixed" in name)


@pytest.mark.parametrize(("profile", "concurrency"), [("serial", 1), ("concurrent", 8), ("arrival", 4)])
def test_serving_profiles(profile: str, concurrency: int) -> None:
    fixed, variable = preset(f"seed-{profile}-fixed"), preset(f"seed-{profile}-variable")
    assert prompt_counts(fixed) == {512: 100}
    assert prompt_counts(variable) == {256: 34, 512: 33, 768: 33}
    assert [request.prompt_tokens for request in variable.requests[:4]] == [256, 512, 768, 256]
    for workload in (fixed, variable):
        assert {request.max_tokens for request in workload.requests} == {64}
        assert workload.concurrency == concurrency
        last_s = workload.requests[-1].arrival_ns / 1e9
        assert 35 < last_s < 65 if profile == "arrival" else last_s == 0


def test_keys_given_with_a_preset_replace_its_own() -> None:
    slow, fast = (
        preset("chat", num_requests=20, rate=1.0),
        preset("chat", num_requests=20, rate=2.0, concurrency=3),
    )
    assert [r.prompt_tokens for r in slow.requests] == [r.prompt_tokens for r in fast.requests]
    assert fast.requests[-1].arrival_ns == pytest.approx(slow.requests[-1].arrival_ns / 2, abs=1)
    assert (slow.concurrency, fast.concurrency) == (None, 3)
    assert "preset chat with its own num_requests, rate, concurrency replaced" in fast.notes
    assert prompt_counts(preset("seed-4x8064", prompt_tokens=16, num_requests=2)) == {16: 2}
    assert (
        preset("seed-4x8064", arrival={"process": "constant", "rate": 1}).requests[3].arrival_ns == 3 * 10**9
    )
    assert preset("seed-4x8064", max_context=8192).max_context == 8192
    assert load_workload(PresetSpec(name="seed-4x8064"), 0).requests == preset("seed-4x8064").requests


def rows_per_invocation(workload: Workload, policy: str, chunk_tokens: int) -> float:
    """Rows per recurrent invocation under the default scheduler, on a device as slow as the seed's (25 ms +
    0.3 ms per row)."""
    settings = SchedulerSettings(
        max_num_seqs=8, max_num_batched_tokens=1024, prefill_chunk_size=chunk_tokens, inflight=2
    )
    log = RunLog()
    engine = Engine(
        Scheduler(POLICIES[policy](), OURO_1_4B, settings, CacheSettings(num_blocks=10**6)),
        Clients(workload.requests),
        log,
    )
    loop = engine.run()
    on_device: deque[Completion] = deque()
    now_ns = free_ns = 0
    command: Command | None = next(loop)
    while command is not None:
        event: Event
        if isinstance(command, Submit):
            batch = command.batch
            started_ns = max(now_ns, free_ns)
            free_ns = started_ns + (batch.loop_count * (25_000_000 + 300_000 * batch.rows) or 500_000)
            on_device.append(Completion(batch.seq, free_ns, started_ns, free_ns))
            event = Tick(now_ns)
        else:
            event = on_device.popleft()
            now_ns = event.now_ns
        try:
            command = loop.send(event)
        except StopIteration:
            command = None
    return log.totals.recurrent_rows / log.totals.recurrent_invocations


@pytest.mark.parametrize(
    ("name", "policy", "chunk_tokens", "published_rows"),
    [
        ("seed-4x8064", "atomic", 16, 64.00),
        ("seed-4x8064", "wcpb", 16, 254.49),
        ("seed-32-mixed", "atomic", 16, 60.00),
        ("seed-32-mixed", "atomic", 128, 480.00),
        ("seed-32-mixed", "wcpb", 16, 238.60),
    ],
)
def test_long_mixes_schedule_exactly_as_published(
    name: str, policy: str, chunk_tokens: int, published_rows: float
) -> None:
    assert rows_per_invocation(preset(name), policy, chunk_tokens) == pytest.approx(published_rows, abs=0.005)


@pytest.mark.parametrize(
    ("policy", "chunk_tokens", "published_rows"),
    [("atomic", 16, 97.57), ("atomic", 128, 451.39), ("wcpb", 16, 361.96)],
)
def test_the_reconstructed_128_mix_comes_within_3_percent(
    policy: str, chunk_tokens: int, published_rows: float
) -> None:
    assert rows_per_invocation(preset("seed-128-mixed"), policy, chunk_tokens) == pytest.approx(
        published_rows, rel=0.03
    )


def test_the_seed_s_row_costs_are_linear_in_mean_context() -> None:
    """0.04 ms + 0.1145 us per token of mean context gives the three published costs per row within 3 %."""
    for name, published_ms in (("seed-4x8064", 0.506), ("seed-32-mixed", 0.326), ("seed-128-mixed", 0.274)):
        lengths = [request.prompt_tokens for request in preset(name).requests]
        mean_context = sum(length * (length + 1) / 2 for length in lengths) / sum(lengths)
        assert 0.04 + 0.0001145 * mean_context == pytest.approx(published_ms, rel=0.03)
