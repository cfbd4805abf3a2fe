"""`requests.csv` as a stream: what is written is what is read, in order of arrival; what has ended is not
kept in memory."""

import io
import random
from array import array
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_backend import World, drive

from policies.core.engine.engine import Engine
from policies.core.engine.runlog import REQUEST_COLUMNS, RequestRecord, RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.errors import InputError, InvariantError
from policies.core.models.shape import OURO_TINY
from policies.core.seam.clients import Clients
from policies.core.seam.events import Command, Event
from policies.core.seam.request import Request, Status
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.wcpb import Wavefront
from results.requestlog import RequestFile, read_requests

TIMES = st.integers(0, 2**62)
REASONS = st.text("a9 ,;:'\"é", max_size=12)


@st.composite
def records(draw: st.DrawFn) -> list[RequestRecord]:
    """Records of any kind in order of arrival, ids in any order."""
    ids = draw(st.lists(st.integers(0, 10**12), unique=True, max_size=12))
    found = []
    for number, request_id in enumerate(ids):
        content = tuple(draw(st.lists(TIMES, max_size=3)))
        request = Request(
            request_id, draw(TIMES), draw(st.integers(1, 10**9)), draw(st.integers(1, 10**9)),
            draw(st.integers(-5, 5)), content, draw(st.integers(1, 512)) if content else 0,
        )  # fmt: skip
        found.append(
            RequestRecord(
                request, number, draw(st.sampled_from(Status)), draw(st.none() | TIMES),
                draw(st.none() | TIMES),
                draw(st.integers(0, 99)), draw(REASONS), array("q", draw(st.lists(TIMES, max_size=5))),
            )
        )  # fmt: skip
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(records(), st.randoms(use_true_random=False), st.integers(0, 12))
def test_what_is_written_in_any_order_is_read_back_in_order_of_arrival(
    tmp_path_factory: pytest.TempPathFactory,
    written: list[RequestRecord],
    draw: random.Random,
    num_ended: int,
) -> None:
    path = tmp_path_factory.mktemp("log") / "requests.csv"
    shuffled = draw.sample(written, len(written))
    file = RequestFile(path)
    for record in shuffled[:num_ended]:
        file.write(record)
    file.finish(shuffled[num_ended:])
    assert [item.record for item in read_requests(path)] == list(file.records()) == written
    assert [item.output_tokens for item in read_requests(path)] == [len(item.token_ns) for item in written]
    assert [item.name for item in path.parent.iterdir()] == ["requests.csv"]


def test_without_finish_the_file_holds_what_had_ended_in_the_order_of_its_ends(tmp_path: Path) -> None:
    file = RequestFile(tmp_path / "requests.csv")
    for number in (2, 0):
        file.write(RequestRecord(Request(number, 0, 4, 1), number))
    file.close()
    assert [record.request.request_id for record in file.records()] == [2, 0]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "line 1: column request_id is missing, expected request_id,"),
        ("a,b\n", "line 1: column request_id is missing, expected request_id,"),
        (",".join(REQUEST_COLUMNS) + "\n1,2\n", f"line 2: 2 fields, expected {len(REQUEST_COLUMNS)}"),
        (
            ",".join(REQUEST_COLUMNS) + "\n0,0,4,0,asleep,,,,0,1,0,,,\n",
            "line 2: status: 'asleep', expected one of waiting,",
        ),
        (
            ",".join(REQUEST_COLUMNS) + "\n0,0,4,0,waiting,,,,0,1,0,,x,\n",
            "line 2: token_ns: 'x', expected whole numbers",
        ),
    ],
)
def test_a_file_that_no_run_wrote_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"requests\.csv {complaint}"):
        list(read_requests(path))
    with pytest.raises(InputError, match=r"nowhere\.csv: no such file, expected a log"):
        list(read_requests(tmp_path / "nowhere.csv"))


class Watched(Engine):
    """An engine whose log is looked at before each of its commands."""

    most_records = 0

    def run(self) -> Generator[Command, Event, None]:
        loop = super().run()
        command = next(loop, None)
        while command is not None:
            live = {*self.scheduler.running} | {
                entry[-1].request_id for entry in self.scheduler.waiting._heap
            }
            assert live >= set(self.log.records) and not any(
                record.finished_ns for record in self.log.records.values()
            )
            self.most_records = max(self.most_records, len(self.log.records))
            try:
                command = loop.send((yield command))
            except StopIteration:
                return


def test_during_a_run_the_log_holds_no_record_of_a_request_that_has_ended() -> None:
    requests = [Request(at, 4_000 * at, 10, 3) for at in range(200)]
    scheduler = Scheduler(
        Wavefront(), OURO_TINY, SchedulerSettings(max_num_seqs=4, inflight=2), CacheSettings(num_blocks=400)
    )
    ended: list[RequestRecord] = []
    engine = Watched(
        scheduler,
        Clients(requests, patience_ns=dict.fromkeys(range(0, 200, 7), 5000)),
        RunLog(io.StringIO(), ended.append),
    )
    drive(engine, World())
    assert 1 <= engine.most_records < 10 and not engine.log.records
    assert sorted(record.request.request_id for record in ended) == list(range(200))
    assert {record.status for record in ended} == {Status.FINISHED, Status.CANCELLED}


def test_a_request_ends_once_and_only_after_it_has_arrived() -> None:
    ended: list[RequestRecord] = []
    log = RunLog(on_ended=ended.append)
    with pytest.raises(
        InvariantError,
        match="invariant 7: request 3 ends as finished and is not among those that wait or run",
    ):
        log.ended(3, Status.FINISHED, 5)
    log.arrived(Request(3, 0, 4, 1))
    log.ended(3, Status.CANCELLED, 7)
    with pytest.raises(InvariantError, match="invariant 7: request 3 ends as finished"):
        log.ended(3, Status.FINISHED, 9)
    with pytest.raises(InvariantError, match="invariant 7: request 3 arrives twice"):
        log.arrived(Request(3, 10, 4, 1))
    assert [(record.status, record.finished_ns) for record in ended] == [(Status.CANCELLED, 7)]
