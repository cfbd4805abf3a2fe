"""Times cases on a session: through the runner, queued behind other batches or on an idle device, as a run
does.

Cases are measured in groups, as many as the rings hold. Within a group the repeats of all cases are launched
in one random order, so that drifts of the device meet all cases alike. A group holds cases of similar size:
near its power limit a device slows down, and a few decode rows among prompts of 2048 would be timed at a
clock that decoding never sees.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from executor.lab.profiling.cases import Case
from executor.lab.profiling.serving import INFLIGHT
from executor.packing import RunningRequest
from executor.runner import Runner
from executor.sensors import Reading, median_reading
from executor.session import Session
from executor.swap import SwapSpace
from executor.timeline import make_timeline
from policies.core.seam.batch import Allocation, ScheduledRange, Stage, Work
from policies.core.seam.request import Request
from results.profile import ProfileRow

LIGHT_ROWS, MIDDLE_ROWS = 64, 320
"""Up to these many rows a batch is light or middling company: below about 300 rows weights and not arithmetic
take the time."""
SMALL_REPEATS = 3
"""Batches without a recurrent loop take microseconds: they are timed so many times as often."""
SWAPPED_GROUPS = (1, 4, 16, 64)
"""Sizes of what is swapped, in groups of a block for every plane."""
READ_EVERY = 8
"""Launches from one reading of the sensors to the next."""
COMPANY = Case(
    "company", "1 decode row at 16", Stage.RECURRENT, 1, (ScheduledRange(0, Stage.RECURRENT, 0, 15, 1),)
)
"""What batches without a recurrent loop are launched behind."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often a case is timed in one visit behind other batches (`busy`) and alone (`idle`)."""

    busy: int
    idle: int


class Sample(NamedTuple):
    """One launch. `was_queued`: it had been launched before the batch ahead of it ended."""

    prepare_ns: int
    launch_ns: int
    device_ns: int
    was_queued: bool


class Measurement:
    """Owns the runner of a profile on `session`, whose pools are filled with random values: nothing measures
    zeros.

    `is_stopped` is asked before every launch; when it answers True, `KeyboardInterrupt` is raised.
    """

    def __init__(self, session: Session, seed: int, is_stopped: Callable[[], bool]) -> None:
        pools = session.pools
        for pool in (pools.kv.k, pools.kv.v):
            for layer in pool:
                layer.normal_()
        pools.hidden.normal_()
        session.programs.eager_uses = 0
        self._session = session
        self.is_stopped = is_stopped
        self._rng = random.Random(seed)
        self._timeline = make_timeline(session.device)
        self._runner = Runner(session.model, pools, session.programs, self._timeline, session.seed)
        self._num_groups = pools.kv.k.shape[1] // pools.kv.planes
        self._next_group = 0
        self._readings: list[Reading] = []
        self._num_launches = 0

    def groups(self, cases: Iterable[Case]) -> list[list[Case]]:
        """`cases` in pieces of similar size that the rings hold, everything in random order."""
        num_rings = len(self._session.pools.host_groups) - len(COMPANY.spans())
        mixed = list(cases)
        self._rng.shuffle(mixed)
        groups: list[list[Case]] = []
        for _, company in groupby(sorted(mixed, key=_company), _company):
            groups.append([])
            for case in company:
                if sum(len(item.spans()) for item in (*groups[-1], case)) > num_rings:
                    groups.append([])
                groups[-1].append(case)
        self._rng.shuffle(groups)
        return groups

    def time(self, cases: Sequence[Case], repeats: Repeats) -> list[ProfileRow]:
        """The measured lines of `cases`, which must be one of `groups`."""
        batches = self._place([*cases, COMPANY])
        for _ in self._launch(batches, inflight=1):
            pass  # compiles and captures what the group needs
        self._readings.clear()
        busy = self._timed(batches, repeats.busy, INFLIGHT)
        reading = median_reading(self._readings)
        idle = self._timed(batches, repeats.idle, 1)
        return [
            replace(
                _summary(case.row(), busy[at], idle[at]),
                clock_mhz=reading.clock_mhz,
                temperature_c=reading.temperature_c,
            )
            for at, case in enumerate(cases)
        ]

    def time_copies(self, cases: Sequence[Case], repeats: Repeats) -> list[ProfileRow]:
        """Lines of cases of kind `copies`: the kernel alone between two marks, queued behind a long fill."""
        pools, planes = self._session.pools, self._session.pools.kv.planes
        rows = []
        for case in cases:
            depths = [item.depth for item in case.ranges]
            places = self._rng.sample(range(self._num_groups), len(case.ranges))
            slots = [
                (group * planes + depth) * pools.kv.block_size
                for group, depth in zip(places, depths, strict=True)
            ]
            at_exit = torch.tensor(slots, dtype=torch.int32, device=self._session.device)
            exit_copy = partial(self._session.model.ops.exit_copy, pools.kv.k, pools.kv.v, at_exit, planes)
            exit_copy()  # compiles
            marks = []
            pools.hidden.normal_()
            for _ in range(1 + repeats.busy):
                start = self._timeline.mark()
                exit_copy()
                marks.append((start, self._timeline.mark()))
            self._session.synchronize()
            ends = [(self._timeline.time_of(start), self._timeline.time_of(end)) for start, end in marks]
            times = [finished_ns - started_ns for started_ns, finished_ns in ends]
            rows.append(replace(case.row(), n=repeats.busy, **spread(times[1:])))
        return rows

    def time_swaps(self, repeats: Repeats, is_wanted: Callable[[ProfileRow], bool]) -> list[ProfileRow]:
        """Lines of kind `swap`: K/V of a request out to page-locked host memory and back, behind a long
        fill."""
        pools = self._session.pools
        space, block_size = SwapSpace(pools), pools.kv.block_size
        most = min(pools.kv.groups.shape[1], self._num_groups)
        rows = []
        for count in (size for size in SWAPPED_GROUPS if size <= most):
            lines = [
                ProfileRow("swap", f"{count} block groups {way}", rows=count * block_size)
                for way in ("out", "back")
            ]
            if not any(is_wanted(line) for line in lines):
                continue
            self._session.synchronize()
            groups = tuple(self._rng.sample(range(self._num_groups), count))
            pools.admit(Allocation(Request(0, 0, count * block_size, 1), groups, 0))
            ways: tuple[list[int], list[int]] = ([], [])
            for _ in range(1 + repeats.busy):
                if self.is_stopped():
                    raise KeyboardInterrupt
                pools.hidden.normal_()
                marks = [self._timeline.mark()]
                space.take_out(0, 0, count)
                marks.append(self._timeline.mark())
                space.bring_back(0, 0)
                marks.append(self._timeline.mark())
                self._session.synchronize()
                started_ns, out_ns, back_ns = map(self._timeline.time_of, marks)
                ways[0].append(out_ns - started_ns)
                ways[1].append(back_ns - out_ns)
            rows += [
                replace(line, n=repeats.busy, **spread(times[1:]))
                for line, times in zip(lines, ways, strict=True)
            ]
        return rows

    def _place(self, cases: Sequence[Case]) -> list[Work]:
        """Give every request of every case a ring and blocks, and return the work in terms of them.

        Blocks of one case never overlap; successive cases walk through the whole pool.
        """
        pools = self._session.pools
        self._session.synchronize()
        self._runner.requests.clear()
        batches = []
        ring_id = 0
        for case in cases:
            ids = {}
            for request_id, span in case.spans().items():
                count = -(-span // pools.kv.block_size)
                groups = tuple((self._next_group + at) % self._num_groups for at in range(count))
                self._next_group = (self._next_group + count) % self._num_groups
                ids[request_id] = ring_id
                prompt = np.zeros(span + 1, dtype=np.int32)
                self._runner.requests[ring_id] = RunningRequest(ring_id, ring_id, prompt, groups)
                pools.admit(Allocation(Request(ring_id, 0, span, 1), groups, ring_id))
                ring_id += 1
            ranges = tuple(item._replace(request_id=ids[item.request_id]) for item in case.ranges)
            batches.append(Work.of(case.stage, case.loop_count, ranges))
        return batches

    def _timed(self, batches: Sequence[Work], repeats: int, inflight: int) -> list[list[Sample]]:
        """Samples of every batch but the last, from one random order of all repeats.

        A batch is launched twice in a row and the second time counts: in a run, too, the batch before read
        the same requests' K/V, so that their addresses have been translated. (The weights between two reads
        are far larger than any cache of contents.) One without a recurrent loop is over before the host has
        launched the next: it comes behind the last of `batches`, which is long enough for both launches; in a
        run, too, it comes behind a recurrent batch.
        """
        *timed, _ = batches
        order = [
            at
            for at, batch in enumerate(timed)
            for _ in range(repeats if batch.loop_count else SMALL_REPEATS * repeats)
        ]
        self._rng.shuffle(order)
        launches: list[tuple[int, bool]] = []
        for at in order:
            if not batches[at].loop_count:
                launches.append((len(timed), False))
            launches += [(at, False), (at, True)]
        samples: list[list[Sample]] = [[] for _ in timed]
        launched = self._launch([batches[at] for at, _ in launches], inflight)
        for (at, counts), sample in zip(launches, launched, strict=True):
            if counts:
                samples[at].append(sample)
        return samples

    def _launch(self, batches: Iterable[Work], inflight: int) -> Iterator[Sample]:
        """Launch `batches`, up to `inflight` before the oldest is collected, and say what each took."""
        runner, now = self._runner, self._timeline.now_ns
        hosts: list[tuple[int, int, int]] = []
        last_finished_ns = 0

        def collect() -> Sample:
            nonlocal last_finished_ns
            while not runner.oldest_is_done():
                pass
            _, started_ns, finished_ns = runner.collect()
            asked_ns, made_ns, done_ns = hosts.pop(0)
            was_queued = done_ns <= last_finished_ns
            last_finished_ns = finished_ns
            return Sample(made_ns - asked_ns, done_ns - made_ns, finished_ns - started_ns, was_queued)

        for batch in batches:
            if self.is_stopped():
                raise KeyboardInterrupt
            asked_ns = now()
            runner.launch(batch)
            hosts.append((asked_ns, runner.launched[-1].start.made_ns, now()))
            self._num_launches += 1
            if self._num_launches % READ_EVERY == 0:
                self._readings.append(self._session.sensors.read())
            if len(hosts) == inflight:
                yield collect()
        while hosts:
            yield collect()


def _company(case: Case) -> int:
    return (case.rows > LIGHT_ROWS) + (case.rows > MIDDLE_ROWS)


def _summary(row: ProfileRow, busy: Sequence[Sample], idle: Sequence[Sample]) -> ProfileRow:
    """`row` with its times. Where the device is never busy when a batch comes (a CPU), all samples count."""
    queued = [sample for sample in busy if sample.was_queued] or busy
    host = [sample.prepare_ns + sample.launch_ns for sample in busy]
    return replace(
        row,
        n=len(queued),
        **spread([sample.device_ns for sample in queued]),
        idle_device_ns=median([sample.device_ns for sample in idle]),
        prepare_ns=median([sample.prepare_ns for sample in busy]),
        launch_ns=median([sample.launch_ns for sample in busy]),
        host_p90_ns=percentile(host, 90),
    )


def spread(times_ns: Sequence[int]) -> dict[str, int]:
    return {
        "device_ns": median(times_ns),
        "device_p10_ns": percentile(times_ns, 10),
        "device_p90_ns": percentile(times_ns, 90),
    }


def percentile(values: Sequence[int], percent: int) -> int:
    """Interpolated, as whole nanoseconds."""
    return round(float(np.percentile(values, percent)))


def median(values: Sequence[int]) -> int:
    return percentile(values, 50)
