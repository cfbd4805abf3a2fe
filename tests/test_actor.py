"""An engine is an actor: mail in, commands out, in whatever environment it is given and beside any number of
others."""

import ast
import io
from collections.abc import Generator
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest
import simpy
from worlds import spelled

from policies.assembly import assemble
from policies.config.runconfig import parse_config
from policies.core.engine.runlog import RequestRecord
from policies.core.errors import StuckError
from policies.core.models.shape import OURO_1_4B
from policies.core.seam.clients import Clients
from policies.core.seam.events import Arrival, HangUp, Wait
from policies.core.seam.inbox import Inbox, Mailbox
from policies.core.seam.oracle import Foresight
from policies.core.seam.request import Request, Status
from policies.costs.models import load_device
from policies.registry import POLICIES
from sim.backend import SimBackend

ROOT = Path(__file__).parent.parent
LATENCY = load_device("h200", OURO_1_4B)


class AsAsked:
    def output_tokens(self, request_id: int) -> int:
        return 1 << 30


class Simulated:
    """An engine with its backend and what it writes."""

    def __init__(self, env: simpy.Environment, inbox: Inbox, policy: str, inflight: int, seed: int) -> None:
        raw = {
            "policy": spelled(policy),
            "scheduler": {"max_num_seqs": 4, "prefill_chunk_size": 32, "inflight": inflight},
            "cache": {"num_blocks": 2000},
            "workload": {"kind": "synthetic", "num_requests": 1, "prompt_tokens": 1, "output_tokens": 1},
        }
        config = parse_config(raw, Path("."), "test")
        self.text, self.ended = io.StringIO(), list[RequestRecord]()
        self.engine = assemble(config, OURO_1_4B, inbox, self.text, self.ended.append)
        foresight = Foresight(AsAsked(), None, config.rule(OURO_1_4B))
        self.backend = SimBackend(env, self.engine, LATENCY, foresight, seed=seed)

    def lines(self) -> tuple[str, list[tuple[Any, ...]]]:
        return self.text.getvalue(), [
            (record.request, record.status, record.finished_ns, tuple(record.token_ns))
            for record in self.ended
        ]


def drawn(chance: Random, count: int, mean_gap_ns: int) -> list[Request]:
    at_ns, requests = 0, []
    for request_id in range(count):
        at_ns += chance.choice([0, int(chance.expovariate(1 / mean_gap_ns))]) if request_id else 0
        requests.append(Request(request_id, at_ns, chance.randint(1, 400), chance.randint(1, 20)))
    return requests


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_mail_that_is_posted_while_the_engine_runs_gives_the_bytes_of_mail_that_was_known_before(
    policy: str, seed: int
) -> None:
    """Whether the future is known (a workload's clients) or comes by post, hang-ups included, nothing
    differs."""
    chance = Random(seed)
    requests = drawn(chance, 25, chance.choice([200_000, 5_000_000, 60_000_000]))
    patience_ns = {
        item.request_id: chance.randint(0, 400_000_000) for item in requests if chance.random() < 0.4
    }
    inflight = chance.randint(1, 4)
    known = Simulated(simpy.Environment(), Clients(requests, None, patience_ns), policy, inflight, seed)
    known.backend.run()

    env, box = simpy.Environment(), Mailbox()
    posted = Simulated(env, box, policy, inflight, seed)
    mail = [Arrival(item.arrival_ns, item) for item in requests]
    gone = [HangUp(item.arrival_ns + patience_ns[item.request_id], item.request_id) for item in requests
            if item.request_id in patience_ns]  # fmt: skip

    def post() -> Generator[simpy.Event, None, None]:
        for item in sorted([*mail, *gone], key=lambda item: (item.at_ns, isinstance(item, HangUp))):
            if item.at_ns > env.now:
                yield env.timeout(item.at_ns - env.now)
            box.post(item)
        box.close()

    env.process(post())
    posted.backend.run()
    assert posted.lines() == known.lines()
    posted.engine.scheduler.check_drained()


def test_three_engines_share_an_environment_behind_a_router_of_ten_lines() -> None:
    requests = drawn(Random(3), 120, 4_000_000)
    env = simpy.Environment()
    outstanding = [0, 0, 0]
    boxes = [Mailbox(lambda request, status, known_ns, at=at: ended(at)) for at in range(3)]
    replicas = [
        Simulated(env, box, policy, 2, 0)
        for box, policy in zip(boxes, ("wcpb", "mixed", "split"), strict=True)
    ]

    def ended(at: int) -> None:
        outstanding[at] -= 1

    def least_loaded() -> Generator[simpy.Event, None, None]:
        for request in requests:
            yield env.timeout(request.arrival_ns - env.now)
            at = outstanding.index(min(outstanding))
            outstanding[at] += 1
            boxes[at].post(Arrival(request.arrival_ns, request))
        for box in boxes:
            box.close()

    env.process(least_loaded())
    env.run(env.all_of([replica.backend.start() for replica in replicas]))
    served = [[record.request.request_id for record in replica.ended] for replica in replicas]
    assert sorted(chain.from_iterable(served)) == list(range(120)) and min(map(len, served)) > 20
    assert outstanding == [0, 0, 0]
    for replica in replicas:
        assert {record.status for record in replica.ended} == {Status.FINISHED}
        replica.engine.scheduler.check_drained()


def test_an_open_engine_that_nobody_writes_to_waits_and_is_not_stuck() -> None:
    env, box = simpy.Environment(), Mailbox()
    lonely = Simulated(env, box, "wcpb", 2, 0)
    process = lonely.backend.start()
    env.run(until=1_000_000_000)
    assert process.is_alive
    box.post(Arrival(1_000_000_000, Request(0, 1_000_000_000, 10, 2)))
    env.run(until=2_000_000_000)
    assert process.is_alive and [record.status for record in lonely.ended] == [Status.FINISHED]
    box.close()
    env.run(process)


def test_a_world_in_which_nothing_can_happen_any_more_ends_with_a_sentence() -> None:
    with pytest.raises(StuckError, match="the engine waits and nothing will happen any more"):
        Simulated(simpy.Environment(), Mailbox(), "wcpb", 2, 0).backend.run()


def test_a_closed_mailbox_takes_nothing_more() -> None:
    box = Mailbox()
    box.close()
    with pytest.raises(ValueError, match="posted to a mailbox that was closed"):
        box.post(HangUp(5, 1))


def test_at_equal_times_arrivals_come_before_hang_ups_and_each_in_order() -> None:
    box = Mailbox()
    late, early = Request(1, 7, 5, 1), Request(2, 3, 5, 1)
    for mail in (
        HangUp(9, 2),
        HangUp(9, 1),
        Arrival(9, late),
        Arrival(9, early),
        Arrival(8, Request(0, 8, 5, 1)),
    ):
        box.post(mail)
    taken = [box.pop(9) for _ in range(5)]
    assert [type(mail).__name__ for mail in taken] == ["Arrival"] * 3 + ["HangUp"] * 2
    assert taken[1:] == [Arrival(9, early), Arrival(9, late), HangUp(9, 1), HangUp(9, 2)]


def test_a_hang_up_on_a_request_that_has_ended_keeps_nobody_waiting() -> None:
    box = Mailbox()
    request = Request(0, 0, 5, 1)
    box.post(Arrival(0, request))
    box.post(HangUp(10**12, 0))
    assert box.pop(0) == Arrival(0, request) and box.next_ns() == 10**12
    box.ended(request, Status.FINISHED, 50)
    assert box.next_ns() is None


def test_an_engine_waits_for_the_next_mail_it_knows_of_and_for_anything_when_it_knows_of_none() -> None:
    box = Mailbox()
    engine = Simulated(simpy.Environment(), box, "atomic", 2, 0).engine
    assert next(engine.run()) == Wait(None)


@pytest.mark.parametrize("name", ["sim/backend.py", "executor/backend.py", "sim/replay.py"])
def test_backends_know_of_an_engine_only_its_loop_and_its_inbox(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", "") == "engine" or getattr(node.value, "attr", "") == "_engine")
    }
    assert found <= {"run", "inbox"}
