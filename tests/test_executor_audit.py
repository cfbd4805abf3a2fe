"""The address audit: it accepts what the packer writes, splits of long histories too, and names every kind of
wrong address."""

from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from executor.checks.audit import AddressAudit  # noqa: E402
from executor.errors import AuditError  # noqa: E402
from executor.kernels.meta import HostMeta, MetaLayout  # noqa: E402
from executor.kernels.worklist import Packer  # noqa: E402
from executor.packing import BatchPacker, RunningRequest  # noqa: E402
from executor.pools import Pools  # noqa: E402
from policies.core.models.shape import OURO_TINY  # noqa: E402
from policies.core.seam.batch import Allocation, ScheduledRange, Stage, Transfers, Work  # noqa: E402
from policies.core.seam.request import Request  # noqa: E402

PLANES, BLOCK_SIZE, CHUNK = 4, 16, 32
Corrupt = Callable[[HostMeta], None]


class Bed:
    """Three requests with shuffled blocks and room for 2,048 positions each; rings of four chunks of 32 rows,
    for a wavefront."""

    def __init__(self, slots: int) -> None:
        groups_per_ring = 2048 // BLOCK_SIZE
        self.pools = Pools.allocate(
            OURO_TINY,
            3 * groups_per_ring * PLANES,
            BLOCK_SIZE,
            PLANES,
            3,
            PLANES * CHUNK,
            2048,
            torch.float32,
            torch.device("cpu"),
        )
        order = np.random.default_rng(0).permutation(3 * groups_per_ring).tolist()
        self.requests = {}
        self.audit = AddressAudit(
            PLANES, PLANES, BLOCK_SIZE, CHUNK, PLANES, self.pools.ring_rows, self.pools.kv, True
        )
        for at in range(3):
            groups = tuple(order[at * groups_per_ring : (at + 1) * groups_per_ring])
            prompt = np.arange(1900, dtype=np.int32) % 512
            self.requests[10 + at] = RunningRequest(10 + at, 2 - at, prompt, groups)
            allocation = Allocation(Request(10 + at, 0, len(prompt), 9), groups, 2 - at)
            self.pools.admit(allocation)
            self.audit.transfer(Transfers(allocations=(allocation,)), {10 + at: prompt})
        packer = Packer(self.pools.host_groups, PLANES, BLOCK_SIZE, OURO_TINY.num_heads, slots, (16, 64))
        self.packer = BatchPacker(packer, self.pools, PLANES, has_gate=True)

    def check(
        self,
        batch: Work,
        corrupt: Corrupt = lambda host: None,
        surplus: frozenset[int] = frozenset(),
    ) -> int:
        host = HostMeta.allocate(MetaLayout.for_rows(128), pin=False)
        host.buffer.fill_(99)
        self.packer.pack(host, batch, self.requests, surplus)
        corrupt(host)
        self.audit.check(batch, host, surplus)
        return self.audit.rows_checked


def work_of(stage: Stage, loops: int, *ranges: ScheduledRange) -> Work:
    return Work.of(stage, loops, ranges)


def prompt(request_id: int, depth: int, start: int, count: int, embeds: bool = False) -> ScheduledRange:
    chunk, offset = divmod(start, CHUNK)
    stage = Stage.PREFILLING_RECURRENT
    return ScheduledRange(
        request_id, stage, depth, start, count, chunk * CHUNK, chunk % PLANES * CHUNK + offset, embeds
    )


def row(request_id: int, stage: Stage, position: int, depth: int = 0) -> ScheduledRange:
    return ScheduledRange(request_id, stage, depth, position, 1)


MIXED = work_of(
    Stage.RECURRENT,
    1,
    row(12, Stage.RECURRENT, 1950, 2),
    prompt(10, 3, 1888, 12),
    prompt(11, 1, 64, 20),
    prompt(11, 0, 96, 32, True),
)
STAGED = work_of(
    Stage.PREFILLING_PRELUDE, 0, prompt(10, 0, 40, 24, True)._replace(stage=Stage.PREFILLING_PRELUDE)
)
BATCHES = {
    "mixed": MIXED,
    "all depths": work_of(Stage.RECURRENT, 4, row(10, Stage.RECURRENT, 2000), row(11, Stage.RECURRENT, 1901)),
    "staging": STAGED,
    "prelude": work_of(Stage.PRELUDE, 0, row(10, Stage.PRELUDE, 1900), row(12, Stage.PRELUDE, 1950)),
    "coda": work_of(Stage.CODA, 0, row(11, Stage.CODA, 1899), row(10, Stage.CODA, 1912)),
    "coda of early exits": work_of(
        Stage.CODA, 0, row(11, Stage.CODA, 1899), row(10, Stage.CODA, 1912, 1), row(12, Stage.CODA, 1950, 3)
    ),
}


@pytest.mark.parametrize("slots", [1, 100, 5000])
@pytest.mark.parametrize("name", BATCHES)
def test_what_the_packer_writes_is_what_first_principles_say(name: str, slots: int) -> None:
    assert Bed(slots).check(BATCHES[name]) == BATCHES[name].rows


def test_a_row_known_to_be_surplus_writes_nothing_and_the_others_do() -> None:
    batch = BATCHES["all depths"]
    assert Bed(1).check(batch, surplus=frozenset({11})) == 2
    with pytest.raises(
        AuditError, match=r"request 11, position 1901, depth 0: slots is [0-9]+, first principles say -1"
    ):
        Bed(1).check(batch, put("slots", 1, 5), frozenset({11}))


def test_long_histories_are_split_when_the_device_has_room() -> None:
    host = HostMeta.allocate(MetaLayout.for_rows(128), pin=False)
    bed = Bed(5000)
    bed.packer.pack(host, MIXED, bed.requests)
    assert host.header.tolist()[:3] == [65, 4 + 4 + 1 + 1, 1 + 12]


def put(field: str, at: object, value: int) -> Corrupt:
    def corrupt(host: HostMeta) -> None:
        getattr(host, field)[at] = value

    return corrupt


@pytest.mark.parametrize(
    ("batch", "corrupt", "sentence"),
    [
        (MIXED, put("slots", 0, 5), "request 12, position 1950, depth 2: slots is 5"),
        (MIXED, put("positions", 13, 1), "request 11, position 64, depth 1: positions is 1"),
        (MIXED, put("source_rows", 1, 0), "request 10, position 1888, depth 3: source_rows is 0"),
        (MIXED, put("target_rows", 12, -1), "request 10, position 1899, depth 3: target_rows is -1"),
        (MIXED, put("token_ids", 40, 500), "request 11, position 103, depth 0: token_ids is 500"),
        (MIXED, put("slots", 70, 3), "a padding row has an address in slots"),
        (MIXED, put("header", 0, 64), "its header counts 64 rows, it has 65"),
        (
            MIXED,
            put("items", (0, 3), 1),
            r"attention reads \(position, ring, plane, tile\) .*, first principles say",
        ),
        (MIXED, put("items", (0, 4), 0), r"attention reads \(position, ring, plane, tile\)"),
        (MIXED, put("items", (0, 6), 3), r"attention reads \(position, ring, plane, tile\)"),
        (MIXED, put("header", 1, 9), "attention reads no more than tiles"),
        (MIXED, put("combines", (0, 3), 2), "2 splits are combined, first principles say 4"),
        (MIXED, put("combines", (0, 1), 77), "the one combined is 77"),
        (MIXED, put("header", 2, 0), "4 splits are never combined"),
        (MIXED, put("items", (9, 1), 80), "attention"),
        (STAGED, put("token_ids", 3, 0), "request 10, position 43, depth 0: token_ids is 0"),
        (
            BATCHES["prelude"],
            put("sampled_rows", 1, 1),
            "request 12, position 1950, depth 0: sampled_rows is 1",
        ),
        (BATCHES["coda"], put("source_rows", 0, 9), "request 11, position 1899, depth 0: source_rows is 9"),
        (
            BATCHES["coda of early exits"],
            put("slots", 1, 9),
            "request 10, position 1912, depth 1: slots is 9",
        ),
        (
            BATCHES["coda of early exits"],
            put("slots", 0, 9),
            "request 11, position 1899, depth 0: slots is 9",
        ),
        (MIXED, put("gates", 0, 9), "request 12, position 1950, depth 2: gates is 9, first principles say 2"),
    ],
)
def test_a_wrong_address_is_named_with_its_request_and_position(
    batch: Work, corrupt: Corrupt, sentence: str
) -> None:
    with pytest.raises(AuditError, match=sentence):
        Bed(5000).check(batch, corrupt)


def test_a_stale_block_table_on_the_device_is_noticed() -> None:
    bed = Bed(1)
    bed.pools.kv.groups[1, 5] += 1
    with pytest.raises(AuditError, match="request 11, position 64, depth 1: the device's table names groups"):
        bed.check(MIXED)
