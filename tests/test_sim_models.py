"""The shipped latency models against the figures they stand for (facts.md sections 2 and 3)."""

import warnings
from itertools import pairwise
from pathlib import Path

import pytest

from policies.config.runconfig import parse_config
from policies.core.engine.runlog import RequestRecord
from policies.core.errors import InputError
from policies.core.models.shape import OURO_1_4B, OURO_2_6B, OURO_TINY
from policies.core.seam.batch import ScheduledRange, Stage, Work
from policies.core.seam.events import COMPONENTS
from policies.costs.devices import CATALOGUE, device_facts
from policies.costs.limit import Roofline
from policies.costs.models import TableModel, load_device
from results.identity import RunIdentity
from results.metrics import Peaks, summarize
from sim.run import Simulation

MEASURED_MS = {
    1: 0.945, 8: 0.995, 16: 1.013, 32: 1.036, 64: 1.089, 128: 1.108, 256: 1.220, 384: 1.698, 512: 1.997,
    768: 2.931, 1024: 3.997, 2048: 7.851,
}  # fmt: skip
LIMIT_MS = {
    1: 0.584, 8: 0.584, 16: 0.584, 32: 0.584, 64: 0.584, 128: 0.584, 256: 0.822, 384: 1.233, 512: 1.644,
    768: 2.466, 1024: 3.288, 2048: 6.576,
}  # fmt: skip
PUBLISHED = [
    ("seed-4x8064", "atomic", 16, 64.00, 275.82),
    ("seed-4x8064", "wcpb", 16, 254.49, 412.01),
    ("seed-4x8064", "wcpb", 128, None, 465.31),
    ("seed-32-mixed", "atomic", 128, 480.00, 662.25),
    ("seed-32-mixed", "atomic", 16, 60.00, 337.51),
    ("seed-32-mixed", "wcpb", 16, 238.60, 628.45),
    ("seed-128-mixed", "atomic", 128, 451.39, 758.72),
    ("seed-128-mixed", "atomic", 16, 97.57, 471.95),
    ("seed-128-mixed", "wcpb", 16, 361.96, 740.29),
]


def h200() -> TableModel:
    model = load_device("h200-analytic", OURO_1_4B)
    assert isinstance(model, TableModel)
    return model


def work_of(stage: Stage, loops: int, *ranges: tuple[int, int]) -> Work:
    """A batch with one range (token_start, token_count) for each request."""
    items = tuple(ScheduledRange(at, stage, 0, start, count) for at, (start, count) in enumerate(ranges))
    return Work.of(stage, loops, items)


DECODE = work_of(Stage.RECURRENT, 1, *[(1023, 1)] * 8)


def test_the_h200_table_gives_every_measured_point_itself() -> None:
    model = h200()
    assert {rows: round(model.linear_ns(rows)) for rows in MEASURED_MS} == {
        rows: round(1e6 * ms) for rows, ms in MEASURED_MS.items()
    }


def test_more_rows_never_take_less_time_and_stay_between_the_measured_neighbours() -> None:
    model, points = h200(), list(MEASURED_MS)
    times = [model.linear_ns(rows) for rows in range(1, 2049)]
    assert times == sorted(times)
    for low, high in pairwise(points):
        middle = model.linear_ns((low + high) // 2)
        assert 1e6 * MEASURED_MS[low] < middle < 1e6 * MEASURED_MS[high]


def test_a_batch_beyond_the_table_goes_on_at_the_last_slope_and_warns_once_with_the_numbers() -> None:
    model = h200()
    with pytest.warns(
        UserWarning, match="h200-analytic: 3072 rows is beyond the measured 2048; extrapolated"
    ):
        assert round(model.linear_ns(3072)) == round(1e6 * (7.851 + (7.851 - 3.997)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.linear_ns(4096)
        model.linear_ns(3072)


def test_within_the_table_nothing_is_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        h200().predict(work_of(Stage.PREFILL, 4, (0, 2048)))


def test_the_limit_of_the_linear_layers_is_the_published_row_of_the_table() -> None:
    roofline = Roofline(OURO_1_4B, device_facts("h200"))
    for rows, limit_ms in LIMIT_MS.items():
        assert abs(roofline.linear_ns(rows) / 1e6 - limit_ms) < 0.001, (
            rows
        )  # the table was computed from 2.466 GB, rounded


def test_eight_decode_rows_over_1024_tokens_have_a_limit_of_0_97_ms() -> None:
    roofline = Roofline(OURO_1_4B, device_facts("h200"))
    parts = roofline.parts(DECODE)
    assert (round(parts.linear / 1e6, 3), round(parts.attention / 1e6, 3)) == (0.584, 0.382)
    assert round(h200().predict(DECODE).limit_ns / 1e6, 2) == 0.97


@pytest.mark.parametrize("device", ["h200", "h200-2026-11-30", "h200-analytic", "roofline:h200"])
@pytest.mark.parametrize(
    "batch",
    [
        DECODE,
        work_of(Stage.RECURRENT, 4, (10, 1)),
        work_of(Stage.PREFILL, 4, (0, 512)),
        work_of(Stage.PREFILLING_RECURRENT, 1, (8000, 16)),
        work_of(Stage.CODA, 0, (9, 1), (12, 1)),
        work_of(Stage.PRELUDE, 0, (10, 1)),
    ],
    ids=lambda batch: f"{batch.stage}-{batch.rows}x{batch.loop_count}",
)
def test_no_prediction_is_below_its_physical_limit_and_the_breakdown_adds_up(
    device: str, batch: Work
) -> None:
    prediction = load_device(device, OURO_1_4B).predict(batch)
    rounding_ns = len(COMPONENTS)
    assert prediction.device_ns >= prediction.limit_ns - rounding_ns
    breakdown = prediction.breakdown()
    assert sum(breakdown[name] for name in COMPONENTS) == prediction.device_ns
    assert all(value >= 0 for value in breakdown.values())


def test_a_batch_of_four_loops_costs_four_times_the_batch_of_one() -> None:
    model = h200()
    one, four = (model.predict(work_of(Stage.PREFILL, loops, (64, 64))) for loops in (1, 4))
    assert abs(four.device_ns - 4 * one.device_ns) <= 4 * len(COMPONENTS)
    assert (four.select_ns, four.host_ns) == (one.select_ns, one.host_ns)


def test_a_model_with_twice_the_layers_takes_twice_the_linear_time() -> None:
    larger = load_device("h200-analytic", OURO_2_6B)
    assert isinstance(larger, TableModel)
    assert round(larger.linear_ns(64)) == round(2 * h200().linear_ns(64))


def test_the_seeds_model_is_25_ms_per_invocation_and_a_row_cost_linear_in_context() -> None:
    model = load_device("a100-seed", OURO_1_4B)
    row_ns = 40_000 + 115.57 * 4033
    prediction = model.predict(work_of(Stage.RECURRENT, 1, (4032, 1)))
    assert abs(prediction.device_ns - 25_000_000 - row_ns) < 2
    assert (prediction.select_ns, prediction.host_ns, model.loop.collect_ns) == (0, 0, 0)
    assert model.predict(work_of(Stage.CODA, 0, (9, 1))).device_ns == 0


@pytest.mark.parametrize(("preset", "policy", "chunk", "rows", "tokens_per_s"), PUBLISHED)
def test_the_seeds_published_figures_come_out_within_8_percent(
    preset: str, policy: str, chunk: int, rows: float | None, tokens_per_s: float
) -> None:
    raw = {
        "device": "a100-seed",
        "policy": policy,
        "scheduler": {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1024,
            "prefill_chunk_size": chunk,
            "inflight": 2,
        },
        "workload": {"kind": "preset", "name": preset},
    }
    config = parse_config(raw, Path("."), "published")
    simulation = Simulation.prepare(config)
    ended: list[RequestRecord] = []
    engine = simulation.engine(on_ended=ended.append)
    simulation.backend(engine).run()
    summary = summarize(
        ended,
        engine.log.totals,
        Peaks.of(engine.scheduler),
        RunIdentity.from_config(config.resolved, "sim", 4),
    )
    assert abs(summary["prompt_token_throughput"] / tokens_per_s - 1) <= 0.08
    if preset == "seed-4x8064" and rows is not None:
        assert round(summary["rows_per_recurrent_invocation"], 2) == rows
    elif rows is not None:
        assert (
            abs(summary["rows_per_recurrent_invocation"] / rows - 1) < 0.025
        )  # the mixes are reconstructions


def test_every_card_of_the_catalogue_has_a_roofline_at_which_batches_run_at_their_limit() -> None:
    names = [
        line.split(":")[0] for line in CATALOGUE.read_text().splitlines() if line and line[0] not in "# "
    ]
    assert len(names) >= 12
    for name in names:
        prediction = load_device(f"roofline:{name}", OURO_1_4B).predict(DECODE)
        facts = device_facts(name)
        exact_ns = (
            2_466_250_752 / facts.bandwidth_bytes_per_s * 1e9
            + 8 * 1024 * 196_608 / facts.bandwidth_bytes_per_s * 1e9
        )
        assert prediction.device_ns == prediction.limit_ns
        if name != "cpu":
            assert abs(prediction.limit_ns - exact_ns) <= 2


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "h20",
            "device: unknown device 'h20', expected one of h200, h200-2026-11-30, h200-analytic, a100-seed, "
            "roofline:<card>, transfer:<device>:<card>, MODEL.json; did you mean 'h200'?",
        ),
        (
            "tpu-v9",
            "device: unknown device 'tpu-v9', expected one of h200, h200-2026-11-30, h200-analytic, "
            "a100-seed, roofline:<card>",
        ),
        ("roofline:h900", "device: unknown card 'h900', expected one of h200, h200-sxm"),
    ],
)
def test_an_unknown_device_is_one_sentence_with_the_names_there_are(name: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        load_device(name, OURO_1_4B)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("name", ["h200", "h200-2026-11-30"])
def test_a_card_is_analytic_for_a_model_that_was_not_profiled_on_it_and_says_why(name: str) -> None:
    latency = load_device(name, OURO_TINY)
    assert isinstance(latency, TableModel)
    reason = f"{name} was fitted for ouro-1.4b with vocab_size 49152, ouro-tiny has 512"
    assert latency.provenance.startswith(f"{reason}, so h200-analytic: analytic")


def test_every_model_says_where_its_numbers_come_from() -> None:
    data = {
        name: load_device(name, OURO_1_4B).provenance
        for name in ("h200", "h200-analytic", "a100-seed", "roofline:l4")
    }
    assert "fitted on one NVIDIA H200" in data["h200"]
    assert "analytic" in data["h200-analytic"] and "measured" in data["h200-analytic"]
    assert "published" in data["a100-seed"]
    assert "datasheet" in data["roofline:l4"] and "assumed" in data["roofline:l4"]
