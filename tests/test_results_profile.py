"""A profile survives being written, cut and gone on with; what is no whole profile is refused with one
sentence."""

from dataclasses import replace
from pathlib import Path

import pytest

from policies.core.errors import InputError
from policies.core.seam.batch import ScheduledRange, Stage
from results.profile import COLUMNS, HEADER_KEYS, ProfileRow, ProfileWriter, read_part, read_profile

HEADER = dict.fromkeys(HEADER_KEYS, "") | {
    "schema": "1",
    "gpu": "NVIDIA H200",
    "seed": "0",
    "row_buckets": "1 2 4",
}
MIXED = ProfileRow(
    "batch", "mixed, chunk 16", Stage.RECURRENT, 1, 17, "3:RECURRENT:2:70:1 9:PREFILLING_RECURRENT:0:32:16",
    n=15, device_ns=1_500_000, device_p10_ns=1_490_000, device_p90_ns=1_600_000, idle_device_ns=1_550_000,
    prepare_ns=60_000, launch_ns=20_000, host_p90_ns=95_000, clock_mhz=1980, temperature_c=41,
)  # fmt: skip
GAP = ProfileRow("gap", "next batch queued", n=400, device_ns=2_000, device_p10_ns=1_900, device_p90_ns=2_500)
ROWS = (MIXED, GAP)


def write(path: Path, rows: tuple[ProfileRow, ...] = ROWS, is_finished: bool = True) -> None:
    with ProfileWriter(path, HEADER, frozenset({"gpu"})) as writer:
        writer.append([row for row in rows if not writer.visits(row)])
        if is_finished:
            writer.finish()


def test_a_profile_reads_back_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "p.csv")
    profile = read_profile(tmp_path / "p.csv")
    assert profile.rows == ROWS
    assert profile.header == HEADER
    assert profile.of_kind("gap") == (GAP,)


def test_visits_to_a_case_are_read_as_one_row(tmp_path: Path) -> None:
    slower = replace(
        MIXED, n=5, device_ns=1_600_000, device_p10_ns=1_580_000, device_p90_ns=1_590_000, clock_mhz=1700
    )
    slowest = replace(MIXED, n=5, device_ns=1_900_000, idle_device_ns=None, clock_mhz=None)
    with ProfileWriter(tmp_path / "p.csv", HEADER, frozenset()) as writer:
        writer.append([MIXED, GAP, slowest])
        assert (writer.visits(MIXED), writer.visits(GAP)) == (2, 1)
        writer.append([slower])
        writer.finish()
    profile = read_profile(tmp_path / "p.csv")
    assert profile.lines == (MIXED, GAP, slowest, slower)
    assert MIXED.device_ns is not None and MIXED.device_ns < 1_600_000 and MIXED.loop_count
    assert profile.rows == (replace(MIXED, n=25, clock_mhz=1700), GAP)


def test_a_row_becomes_the_batch_that_was_measured() -> None:
    work = MIXED.work()
    assert (work.stage, work.loop_count, work.rows, work.num_requests) == (Stage.RECURRENT, 1, 17, 2)
    assert work.ranges == (
        ScheduledRange(3, Stage.RECURRENT, 2, 70, 1, 70),
        ScheduledRange(9, Stage.PREFILLING_RECURRENT, 0, 32, 16, 32),
    )
    with pytest.raises(ValueError, match="has no batch"):
        GAP.work()


def test_what_was_measured_before_an_interruption_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    write(path, (MIXED,), is_finished=False)
    with open(path, "a") as file:
        file.write("gap,next batch que")
    assert read_part(path).lines == (MIXED,)
    write(path)
    assert read_profile(path).rows == ROWS


def test_a_finished_profile_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    write(path)
    before = path.read_bytes()
    with ProfileWriter(path, HEADER, frozenset({"gpu"})) as writer:
        assert writer.is_complete
    assert path.read_bytes() == before


def test_another_device_does_not_go_on_with_a_profile(tmp_path: Path) -> None:
    write(tmp_path / "p.csv", is_finished=False)
    with pytest.raises(
        InputError, match=r"begun with gpu 'NVIDIA H200' and this is 'NVIDIA L4': choose another --out"
    ):
        ProfileWriter(tmp_path / "p.csv", HEADER | {"gpu": "NVIDIA L4"}, frozenset({"gpu"}))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("# schema: 1", "# schema: 2", "profile schema 2, expected 1"),
        ("# driver: \n", "", "the header has no `# driver: ...` line"),
        ("kind,case", "kind,name", "expected the columns kind,case"),
        ("\n# complete: 2 lines\n", "\n", "ends after 2 lines"),
        ("# complete: 2 lines", "# complete: 3 lines", "has 2 lines, its last one says '3 lines'"),
        ("\ngap,", "\ngasp,", "kind 'gasp', expected one of linear"),
        (",1980,41", ",1980", f"{len(COLUMNS) - 1} fields, expected {len(COLUMNS)}"),
        (",1500000,", ",fast,", "invalid literal for int"),
        ("0:32:16", "0:32", "not enough values to unpack"),
        ("0:32:16", "0:32:15", "17 rows, its ranges have 16"),
        (",RECURRENT,1,", ",RECURRING,1,", "'RECURRING' is not a valid Stage"),
    ],
)
def test_what_is_no_whole_profile_is_refused(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    path = tmp_path / "p.csv"
    write(path)
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError) as error:
        read_profile(path)
    assert sentence in str(error.value)
    assert str(path) in str(error.value)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    for name, content in (("empty.csv", b""), ("binary.csv", b"\xff\xfe\x00")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=name):
            read_profile(tmp_path / name)
    with pytest.raises(InputError, match="no such file"):
        read_profile(tmp_path / "missing.csv")
