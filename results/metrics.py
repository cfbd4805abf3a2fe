"""The numbers of `summary.json`, from records, the log's totals and the scheduler's peaks. Arithmetic: reads
no file, writes none.

Definitions (times in ns of the run's own clock; "finished" counts requests that ended with their last token)

    duration_s                    (last batch finish - first arrival) / 1e9: the makespan
    request_throughput            finished requests / duration_s
    prompt_token_throughput       prompt tokens of finished requests / duration_s
    output_token_throughput       output tokens of finished requests / duration_s
    cancelled_output_token_throughput   output tokens of cancelled requests / duration_s
    ttft_ms, itl_ms, tpot_ms, e2e_ms   see `results.latency`
    own_itl_mean_ms, own_itl_p99_ms   mean and p99 of each request's own gaps, where itl_ms pools all gaps
    queue_ms                      first scheduled - arrival, of every request that got a token
    rows_per_recurrent_invocation sum over batches of loop_count x rows / sum of loop_count
    num_cancelled                 requests whose client hung up first: what they got until then counts in
                                  ttft_ms, itl_ms, own_itl_* and queue_ms; tpot_ms, e2e_ms and the
                                  throughputs are of finished requests alone
    gpu_busy_fraction             sum of device times / (last batch finish - first batch start), of a fleet
                                  over all its devices
    tokens_by_loops, loops_saved  decoded tokens (all but first ones) by the loops they ran, and the loops
                                  they did not run
    select_us, prepare_us         host time of a batch: choosing it; packing and launching it
    limit_fraction                sum of physical limits / sum of device times; None without limits
    speculation                   where tokens are guessed: rows that guessed and their share of device time;
                                  guesses that were checked and the share of right ones, also by rank (how
                                  far beyond what was certain); tokens_per_target_step: decoded tokens x T
                                  over the loops of batches with decode rows of a request, summed over
                                  requests, which is 1 without guesses
    slo                           objectives, who met them, and goodput: see `results.goodput`
    measured                      what a `measure` left out (`results.window`): then duration_s is the length
                                  of the span, latencies are of requests that arrived in it, throughputs of
                                  what ended in it; counts, tokens and peaks are of the whole run
    device_idle_s                 device time between batches; _host_s of it while the host chose, packed and
                                  launched the next one, _launch_s from then to its start, the rest before
                                  (no work, or a host that collects)

Percentiles are numpy's `linear` method: of n sorted samples, p99 is the value at rank 0.99 x (n - 1),
interpolated between neighbours. Of 1, 2, 3, 4 p50 is 2.5 and p90 is 3.7. Where there is no sample a figure is
None, never NaN.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from policies.core.engine.runlog import BatchTotals, RequestRecord, StageTotals
from policies.core.engine.scheduler import Scheduler
from policies.core.progress.guesses import GuessTotals
from policies.core.seam.events import COMPONENTS
from policies.core.seam.objectives import Objectives
from policies.core.seam.request import Status
from results.goodput import Goodput
from results.identity import RunIdentity
from results.latency import Samples
from results.window import WHOLE, Span, note_of

RunStatus = Literal["complete", "interrupted", "failed"]
LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


@dataclass(frozen=True, slots=True)
class Peaks:
    """What only the scheduler knows at the end.

    High-water marks; rows run for requests that had already ended or tokens that had already left the loop;
    decoded tokens by the loops they ran (index 0 is not used); bytes moved to and from host memory for
    requests that were preempted; blocks and tokens of shared prefixes that new requests reused, their part of
    all whole blocks of their prompts, blocks that requests found when they came back, and blocks that gave up
    a prefix.
    """

    kv_blocks: int = 0
    hidden_rows: int = 0
    surplus_rows: int = 0
    tokens_by_loops: tuple[int, ...] = ()
    swapped_bytes: int = 0
    prefix_hit_blocks: int = 0
    prefix_hit_tokens: int = 0
    prefix_hit_rate: float | None = None
    prefix_resumed_blocks: int = 0
    evicted_blocks: int = 0
    guesses: GuessTotals = field(default_factory=GuessTotals)

    @classmethod
    def of(cls, *schedulers: Scheduler) -> "Peaks":
        """Of one scheduler; of several, the sums."""
        planes = schedulers[0].blocks.planes
        prefixes = [item.residents.prefixes.totals for item in schedulers]
        reused = sum([item.reused_groups for item in prefixes])
        return cls(
            sum([item.blocks.peak_used_blocks for item in schedulers]),
            sum([item.peak_hidden_rows for item in schedulers]),
            sum([item.surplus_rows for item in schedulers]),
            tuple(map(sum, zip(*[item.tokens_by_loops for item in schedulers], strict=True))),
            sum([item.residents.swapped_bytes for item in schedulers]),
            reused * planes,
            sum([item.reused_tokens for item in prefixes]),
            ratio(reused, sum([item.prompt_groups for item in prefixes])),
            sum([item.resumed_groups for item in prefixes]) * planes,
            sum([item.blocks.num_evicted_groups for item in schedulers]) * planes,
            reduce(add, [item.guesses for item in schedulers]),
        )


@dataclass(slots=True)
class Served:
    """What throughputs count: of the whole run, or of what ended within the measured span."""

    finished: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cancelled_output_tokens: int = 0

    def add(self, record: RequestRecord) -> None:
        if record.status is Status.FINISHED:
            self.finished += 1
            self.prompt_tokens += record.request.prompt_tokens
            self.output_tokens += record.output_tokens
        elif record.status is Status.CANCELLED:
            self.cancelled_output_tokens += record.output_tokens


@dataclass(slots=True)
class RequestTotals:
    """Sums and samples over records, which are taken one after another and not kept: a run may have more than
    memory holds."""

    by_status: Counter[Status] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    first_arrival_ns: int | None = None
    served: Served = field(default_factory=Served)
    served_within: Served = field(default_factory=Served)
    preemptions: int = 0
    num_measured: int = 0
    queue_ns: "array[int]" = field(default_factory=lambda: array("q"))
    samples: Samples = field(default_factory=Samples)
    span: Span = WHOLE
    goodput: Goodput | None = None

    @classmethod
    def of(
        cls, records: Iterable[RequestRecord], span: Span = WHOLE, objectives: Objectives | None = None
    ) -> "RequestTotals":
        totals = cls(span=span, goodput=Goodput(objectives) if objectives else None)
        for record in records:
            totals.add(record)
        return totals

    def add(self, record: RequestRecord) -> None:
        request, status = record.request, record.status
        self.by_status[status] += 1
        self.preemptions += record.preemptions
        if self.first_arrival_ns is None or request.arrival_ns < self.first_arrival_ns:
            self.first_arrival_ns = request.arrival_ns
        is_measured = self.span.has_request(record)
        has_ended = record.finished_ns is not None and self.span.has(record.finished_ns)
        self.num_measured += is_measured
        if self.goodput is not None:
            self.goodput.add(record, is_measured, has_ended)
        if record.first_scheduled_ns is not None and is_measured:
            self.queue_ns.append(record.first_scheduled_ns - request.arrival_ns)
        if status is Status.REFUSED:
            self.refusals[record.reason] += 1
        self.served.add(record)
        if has_ended:
            self.served_within.add(record)
        if is_measured:
            self.samples.add(
                request.arrival_ns, np.frombuffer(record.token_ns, dtype=np.int64), status is Status.FINISHED
            )


def summarize(
    records: Iterable[RequestRecord],
    totals: BatchTotals,
    peaks: Peaks,
    identity: RunIdentity,
    *,
    status: RunStatus = "complete",
    objectives: Objectives | None = None,
    span: Span = WHOLE,
    measured: BatchTotals | None = None,
    num_devices: int = 1,
    skipped_rows: int = 0,
    notes: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything in `summary.json`, in its order; ready for JSON.

    `records` are those of all requests that arrived, in that order, read once (after a full disk: those that
    it holds). `totals` are the log's sums over batches, `measured` those over the batches of `span` where
    that is not the whole run, on `num_devices` devices. `status` is how the run ended; a run that completes
    without one finished request is `failed`, because it shows nothing. `skipped_rows` counts workload rows
    that were not run (failed rows of a trace). `extra` adds keys, for instance the executor's
    `output_token_sha256`; it cannot replace one. Raises `ValueError` when it tries.
    """
    requests = RequestTotals.of(records, span, objectives)
    run_totals, totals = totals, measured or totals
    by_status, num_requests, num_finished = (
        requests.by_status,
        requests.by_status.total(),
        requests.by_status[Status.FINISHED],
    )
    notes = list(notes)
    num_sent = by_status[Status.SENT]
    if status == "complete" and not num_finished and not num_sent:
        status = "failed"
        notes.append(f"no request finished, of {num_requests}")

    first_arrival_ns = requests.first_arrival_ns or 0
    from_ns = first_arrival_ns if span.from_ns is None else span.from_ns
    to_ns = totals.last_finished_ns if span.to_ns is None else min(span.to_ns, run_totals.last_finished_ns)
    duration_s = max(to_ns - from_ns, 0) / 1e9
    served, within, goodput = requests.served, requests.served_within, requests.goodput
    busy_span_ns = totals.last_finished_ns - (totals.first_started_ns or 0)
    latencies = requests.samples.latencies()
    summary: dict[str, Any] = {
        **identity.as_summary(),
        "status": status,
        "num_requests": num_requests,
        "num_finished": num_finished,
        "num_cancelled": by_status[Status.CANCELLED],
        "num_refused": by_status[Status.REFUSED],
        **({"num_sent": num_sent} if num_sent else {}),
        "num_unfinished": by_status[Status.WAITING] + by_status[Status.RUNNING],
        "refusal_reasons": dict(sorted(requests.refusals.items(), key=lambda item: (-item[1], item[0]))),
        "skipped_rows": skipped_rows,
        "first_arrival_ns": first_arrival_ns,
        "duration_s": duration_s,
        "prompt_tokens": served.prompt_tokens,
        "output_tokens": served.output_tokens,
        "cancelled_output_tokens": served.cancelled_output_tokens,
        "request_throughput": ratio(within.finished, duration_s),
        "prompt_token_throughput": ratio(within.prompt_tokens, duration_s),
        "output_token_throughput": ratio(within.output_tokens, duration_s),
        "cancelled_output_token_throughput": ratio(within.cancelled_output_tokens, duration_s),
        "ttft_ms": distribution(latencies.ttft_ns, 1e6),
        "itl_ms": distribution(latencies.itl_ns, 1e6),
        "own_itl_mean_ms": distribution(latencies.own_itl_mean_ns, 1e6),
        "own_itl_p99_ms": distribution(latencies.own_itl_p99_ns, 1e6),
        "tpot_ms": distribution(latencies.tpot_ns, 1e6),
        "e2e_ms": distribution(latencies.e2e_ns, 1e6),
        "queue_ms": distribution(np.array(requests.queue_ns, dtype=np.int64), 1e6),
        "num_batches": totals.num_batches,
        "num_batches_by_stage": {
            str(stage): item.num_batches for stage, item in sorted(totals.by_stage.items())
        },
        "recurrent_invocations": totals.recurrent_invocations,
        "rows_per_recurrent_invocation": ratio(totals.recurrent_rows, totals.recurrent_invocations),
        "gpu_busy_fraction": ratio(totals.device_ns, num_devices * busy_span_ns),
        "limit_fraction": ratio(totals.limit_ns, totals.device_ns) if totals.limit_ns else None,
        "stages": {str(stage): stage_account(item) for stage, item in sorted(totals.by_stage.items())},
        "device_idle_s": totals.idle_ns / 1e9,
        "device_idle_host_s": totals.idle_host_ns / 1e9,
        "device_idle_launch_s": totals.idle_launch_ns / 1e9,
        "peak_kv_blocks": peaks.kv_blocks,
        "peak_hidden_rows": peaks.hidden_rows,
        "surplus_rows": peaks.surplus_rows,
        "tokens_by_loops": {str(loops): count for loops, count in enumerate(peaks.tokens_by_loops) if count},
        "loops_saved": sum(
            (len(peaks.tokens_by_loops) - 1 - loops) * count
            for loops, count in enumerate(peaks.tokens_by_loops)
        ),
        "preemptions": requests.preemptions,
        "swapped_bytes": peaks.swapped_bytes,
        "prefix_hit_blocks": peaks.prefix_hit_blocks,
        "prefix_hit_tokens": peaks.prefix_hit_tokens,
        "prefix_hit_rate": peaks.prefix_hit_rate,
        "prefix_resumed_blocks": peaks.prefix_resumed_blocks,
        "evicted_blocks": peaks.evicted_blocks,
        "select_us": counted_distribution(totals.select_ns, 1e3),
        "prepare_us": counted_distribution(totals.host_ns, 1e3),
        "notes": notes,
    }
    if peaks.guesses.checks:
        summary["speculation"] = guess_account(peaks)
    if goodput is not None:
        summary["slo"] = goodput.as_summary(duration_s)
    if not span.is_whole:
        summary["measured"] = span.as_summary(
            first_arrival_ns, num_requests - requests.num_measured, run_totals, totals
        )
        notes.append(note_of(summary["measured"], num_requests))
    for key, value in (extra or {}).items():
        if key in summary:
            raise ValueError(f"extra key {key!r} is already in the summary")
        summary[key] = value
    return summary


def guess_account(peaks: Peaks) -> dict[str, Any]:
    """What came of guesses."""
    guesses, loops = peaks.guesses, len(peaks.tokens_by_loops) - 1
    ranks = [rank for rank, checks in enumerate(guesses.checks) if checks]
    return {
        "drafts": guesses.drafts,
        "draft_s": guesses.draft_ns / 1e9,
        "checked": sum(guesses.checks),
        "acceptance": ratio(sum(guesses.right), sum(guesses.checks)),
        "checked_by_rank": {str(rank): guesses.checks[rank] for rank in ranks},
        "acceptance_by_rank": {str(rank): guesses.right[rank] / guesses.checks[rank] for rank in ranks},
        "tokens_per_target_step": ratio(loops * sum(peaks.tokens_by_loops), guesses.request_loops),
    }


def stage_account(stage: StageTotals) -> dict[str, Any]:
    """Where the time of one stage went: device and host seconds, the limit's share, and components where
    batches are split."""
    components = {
        name: value / 1e9 for name, value in zip(COMPONENTS, stage.components_ns, strict=True) if value
    }
    return {
        "num_batches": stage.num_batches,
        "device_s": stage.device_ns / 1e9,
        "host_s": stage.host_ns / 1e9,
        "limit_fraction": ratio(stage.limit_ns, stage.device_ns) if stage.limit_ns else None,
        "components_s": components,
    }


def distribution(samples: NDArray[np.int64] | NDArray[np.float64], unit: float) -> dict[str, float | None]:
    """Mean, p50, p90, p95, p99 and max of `samples` (any order) divided by `unit`; all None when there is no
    sample."""
    if not len(samples):
        return dict.fromkeys(STATISTICS)
    p50, p90, p95, p99 = np.percentile(samples, (50, 90, 95, 99), method="linear").tolist()
    values = (float(samples.mean()), p50, p90, p95, p99, float(samples.max()))
    return {name: value / unit for name, value in zip(STATISTICS, values, strict=True)}


def counted_distribution(counts: Mapping[int, int], unit: float) -> dict[str, float | None]:
    """Mean and p99 of samples counted by value, divided by `unit`, as of `distribution`: {2: 3, 7: 1} stands
    for 2, 2, 2, 7."""
    if not counts:
        return {"mean": None, "p99": None}
    values = np.array(sorted(counts), dtype=np.int64)
    ends = np.cumsum([counts[value] for value in values.tolist()])
    rank = 0.99 * (int(ends[-1]) - 1)
    low, high = (
        float(values[np.searchsorted(ends, at, side="right")]) for at in (math.floor(rank), math.ceil(rank))
    )
    mean = sum(value * count for value, count in counts.items()) / int(ends[-1])
    return {"mean": mean / unit, "p99": (low + (high - low) * (rank - math.floor(rank))) / unit}


def ratio(part: float, whole: float) -> float | None:
    """`part / whole`, or None when there is no whole to speak of."""
    return part / whole if whole > 0 else None
