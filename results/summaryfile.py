"""`summary.json` as every reader here takes it: which keys it must have, of which type, and in which bounds.

What no reader looks at may be anything. Keys that came later than the first recorded runs may be missing.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from policies.core.errors import InputError
from policies.process.documents import read_json
from policies.process.sentences import first_problem
from results.batchlog import MOST_LOOPS

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Name = Annotated[str, Field(max_length=4096)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class Statistics(_Part):
    mean: Number | None
    p50: Number | None
    p90: Number | None
    p95: Number | None
    p99: Number | None
    max: Number | None


class Stage(_Part):
    device_s: Seconds
    limit_fraction: Number | None
    components_s: dict[str, Number]


class Slo(_Part):
    ttft_ms: Number | None = None
    itl_ms: Number | None = None
    tpot_ms: Number | None = None
    e2e_ms: Number | None = None
    share_met: Number | None
    goodput: Number | None


class Measured(_Part):
    skip_requests: Count
    from_ns: Annotated[int, Field(ge=-(1 << 62), lt=1 << 63)] | None
    to_ns: Annotated[int, Field(ge=-(1 << 62), lt=1 << 63)] | None
    run_s: Seconds


class Summary(_Part):
    """The keys that readers use."""

    policy: Name
    model: Name
    device: Name
    workload: Name
    world: Name
    config_sha256: Name
    status: Name
    prefill_chunk_size: Annotated[int, Field(ge=1, lt=1 << 63)]
    num_loops: Annotated[int, Field(ge=1, le=MOST_LOOPS)]
    num_requests: Count
    num_finished: Count
    num_refused: Count
    num_batches: Count
    first_arrival_ns: Annotated[int, Field(ge=-(1 << 62), lt=1 << 63)]
    duration_s: Seconds
    device_idle_s: Number
    request_throughput: Number | None
    prompt_token_throughput: Number | None
    output_token_throughput: Number | None
    rows_per_recurrent_invocation: Number | None
    gpu_busy_fraction: Number | None
    limit_fraction: Number | None
    stages: dict[str, Stage]
    ttft_ms: Statistics
    itl_ms: Statistics
    tpot_ms: Statistics
    e2e_ms: Statistics

    policy_options: dict[str, Any] | None = None
    num_cancelled: Count = 0
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    skipped_rows: Count = 0
    refusal_reasons: dict[str, Count] = {}
    notes: list[str] = []
    device_idle_host_s: Number = 0.0
    device_idle_launch_s: Number = 0.0
    padded_row_fraction: Number | None = None
    queue_ms: Statistics | None = None
    offered_request_rate: Number | None = None
    slo: Slo | None = None
    measured: Measured | None = None
    waited_for_places_s: Seconds = 0.0
    waited_for_kv_s: Seconds = 0.0
    limited_by: Name | None = None
    versions: dict[str, Any] | None = None


def read_summary(path: Path) -> dict[str, Any]:
    """The mapping at `path`. Raises `InputError`, one sentence that names the key, for any other file."""
    summary = read_json(path, "the summary of a run")
    if not isinstance(summary, dict):
        raise InputError(f"{path}: holds {type(summary).__name__}, expected a mapping")
    try:
        Summary.model_validate(summary)
    except ValidationError as error:
        raise InputError(f"{path}: {first_problem(error, '')}") from None
    return summary
