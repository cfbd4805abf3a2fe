"""Packed runs: small files that give back the very same logs, and that every command takes in a directory's
place."""

import csv
import io
import lzma
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from results_runs import write_run

from policies.core.errors import InputError
from policies.core.seam.request import Request
from results.cli import main
from results.find import find_runs
from results.load import load_run
from results.logcode import RAW, decode_batches, decode_requests, encode_batches, encode_requests, finished_ns
from results.pack import pack, unpack

ROOT = Path(__file__).parent.parent
LOGS = ("batches.csv", "requests.csv", "summary.json")


def random_requests(seed: int) -> list[Request]:
    draw = random.Random(seed)
    arrivals = sorted(draw.randrange(50_000_000) for _ in range(12))
    return [
        Request(at, arrival_ns, draw.randint(1, 60), draw.randint(1, 9))
        for at, arrival_ns in enumerate(arrivals)
    ]


@pytest.mark.parametrize("policy", ["atomic", "split", "mixed", "wcpb"])
def test_logs_come_back_byte_for_byte_and_are_coded_by_column(tmp_path: Path, policy: str) -> None:
    run = write_run(tmp_path / "run", policy, requests=random_requests(7), trace=False)
    batches, requests = ((run.path / name).read_bytes() for name in ("batches.csv", "requests.csv"))
    coded = encode_batches(batches)
    assert RAW not in coded and decode_batches(coded) == batches
    ends = finished_ns(batches)
    data = encode_requests(requests, ends)
    assert RAW not in data and decode_requests(data, ends) == requests


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("\n0,", "\n00,", 1),
        lambda text: text.removesuffix("\n"),
        lambda text: text.replace("after_seq", "before_seq"),
        lambda text: text.replace(":0:", ":?:", 1),
        lambda text: text.replace(",", ";"),
        lambda text: text + "1,2\n",
        lambda text: "",
    ],
)
def test_a_table_that_is_not_as_we_write_it_still_comes_back(tmp_path: Path, edit: object) -> None:
    run = write_run(tmp_path / "run", trace=False)
    table = edit((run.path / "batches.csv").read_text()).encode()  # type: ignore[operator]
    assert decode_batches(encode_batches(table)) == table


def test_a_token_between_two_batches_is_kept_as_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", trace=False)
    table = (run.path / "requests.csv").read_bytes()
    ends = finished_ns((run.path / "batches.csv").read_bytes())
    assert encode_requests(table, ends + 1) == {RAW: table}
    assert encode_requests(table, np.array([], dtype=np.int64)) == {RAW: table}


def test_a_pack_is_unpacked_into_the_same_runs_and_has_the_same_bytes_every_time(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "cells" / name, name, trace=False) for name in ("atomic", "wcpb")]
    for name in ("one", "two"):
        pack(runs, tmp_path / f"{name}.tar.xz")
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "two.tar.xz").read_bytes()
    places = unpack(tmp_path / "one.tar.xz", tmp_path / "out")
    assert [place.name for place in places] == ["atomic", "wcpb"]
    for run, place in zip(runs, places, strict=True):
        assert [(place / name).read_bytes() for name in LOGS] == [
            (run.path / name).read_bytes() for name in LOGS
        ]
        assert load_run(place).config == run.config


def test_of_repeats_the_first_keeps_its_logs_unless_told_otherwise(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / folder / "run", trace=False) for folder in ("a", "b")]
    for logs, kept in (("first", [True, False]), ("all", [True, True]), ("none", [False, False])):
        file = tmp_path / f"{logs}.tar.xz"
        assert (
            main(["pack", str(tmp_path / "a"), str(tmp_path / "b"), "--logs", logs, "--out", str(file)]) == 0
        )
        found = find_runs([file])[0]
        assert [run.path.name for run in found] == ["run", "run-2"]
        assert [run.has_logs for run in found] == kept
        assert [run.summary for run in found] == [run.summary for run in runs]


def test_folders_of_the_machine_stay_out_of_a_pack(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", trace=False)
    text = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(
        text.replace("  kind: synthetic", "  kind: trace\n  path: /home/me/traces/t.csv")
    )
    pack([load_run(run.path)], tmp_path / "p.tar.xz")
    with tarfile.open(tmp_path / "p.tar.xz") as archive:
        config = archive.extractfile("run/config.yaml")
        assert config is not None and b"path: t.csv\n" in config.read()


def test_packs_stand_for_their_runs_wherever_runs_are_looked_for(tmp_path: Path) -> None:
    write_run(tmp_path / "set" / "plain", "atomic", trace=False)
    pack(
        [write_run(tmp_path / "made" / name, name, trace=False) for name in ("mixed", "wcpb")],
        tmp_path / "set" / "p.tar.xz",
    )
    assert [run.policy for run in find_runs([tmp_path / "set"])[0]] == ["atomic", "mixed", "wcpb"]
    assert [run.policy for run in find_runs([tmp_path / "set" / "p.tar.xz"])[0]] == ["mixed", "wcpb"]
    assert main(["report", str(tmp_path / "set"), "--out", str(tmp_path / "r.html")]) == 0


def test_a_file_that_is_no_whole_pack_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", trace=False)
    good, bad = tmp_path / "p.tar.xz", tmp_path / "bad.tar.xz"
    pack([run], good)

    def refused(*arguments: object) -> str:
        assert main([str(item) for item in arguments]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    bad.write_bytes(good.read_bytes()[:-2000])
    assert "bad.tar.xz: is not a whole pack of runs" in refused("report", bad)
    bad.write_bytes(good.read_bytes()[:-10])
    assert "bad.tar.xz: is not a whole pack of runs" in refused("unpack", bad, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    bad.write_bytes(b"nothing of the kind")
    assert "bad.tar.xz: is not a whole pack of runs" in refused("unpack", bad, "--out", tmp_path / "out")
    with lzma.open(bad, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(run.path / "summary.json", "run/../../summary.json")
    assert "it holds 'run/../../summary.json'" in refused("unpack", bad, "--out", tmp_path / "out")
    assert "p.zip: expected a name that ends in .tar.xz" in refused(
        "pack", run.path, "--out", tmp_path / "p.zip"
    )
    assert "nowhere.tar.xz: no such file" in refused(
        "unpack", tmp_path / "nowhere.tar.xz", "--out", tmp_path / "out"
    )
    (run.path / "batches.csv").write_text((run.path / "batches.csv").read_text().rsplit("\n", 3)[0] + "\n")
    assert "batches, summary.json says" in refused("pack", run.path, "--out", good)
    (run.path / "batches.csv").write_text("")
    assert "is not a whole log of batches" in refused("pack", run.path, "--out", good)
    (run.path / "batches.csv").unlink()
    assert "has no batches.csv to keep" in refused("pack", run.path, "--out", good)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
@pytest.mark.parametrize(
    "name", ["run/config.yaml", "../config.yaml", "/config.yaml", "run/plots/a.png", "run/evil.sh"]
)
def test_nothing_but_the_files_of_runs_comes_out_of_a_pack(tmp_path: Path, kind: bytes, name: str) -> None:
    for is_link in (False, True):
        member = tarfile.TarInfo(name)
        member.type, member.linkname = (kind, "config.yaml") if is_link else (tarfile.REGTYPE, "")
        with (
            lzma.open(tmp_path / "bad.tar.xz", "wb") as stream,
            tarfile.open(fileobj=stream, mode="w") as archive,
        ):
            archive.addfile(member)
        with pytest.raises(InputError, match="is not a whole pack of runs"):
            unpack(tmp_path / "bad.tar.xz", tmp_path / "out")
        assert [item.name for item in tmp_path.iterdir()] == ["bad.tar.xz"]


def test_a_run_is_refused_before_its_pack_replaces_an_older_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", trace=False)
    pack([run], tmp_path / "p.tar.xz")
    before = (tmp_path / "p.tar.xz").read_bytes()
    (run.path / "requests.csv").unlink()
    with pytest.raises(InputError, match=r"has no requests\.csv to keep"):
        pack([run], tmp_path / "p.tar.xz")
    assert (tmp_path / "p.tar.xz").read_bytes() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["p.tar.xz", "run"]


def members_of(path: Path) -> list[tuple[str, bytes]]:
    found = []
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            found.append((member.name, content.read()))
    return found


def write_members(path: Path, members: list[tuple[str, bytes]]) -> None:
    with lzma.open(path, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    runs = [write_run(folder / name, name, trace=False) for name in ("atomic", "wcpb")]
    pack(runs, folder / "p.tar.xz")
    return folder / "p.tar.xz"


def test_a_run_of_which_any_file_is_missing_or_that_is_there_twice_is_not_unpacked(
    packed: Path, tmp_path: Path
) -> None:
    members = members_of(packed)
    half = [name for name, _ in members if name.startswith("wcpb/")]
    bad, last = tmp_path / "bad.tar.xz", "wcpb/batches.csv/25.reused.txt"
    assert last in half  # without it the log is one from before there were shared prefixes
    for name in (*half, None):
        if name is None:
            write_members(bad, [*members, members[0]])
        else:
            write_members(bad, [item for item in members if item[0] != name])
        if name == last:
            continue
        with pytest.raises(InputError, match=r"bad.tar.xz: is not a whole pack of runs \("):
            unpack(bad, tmp_path / str(name).replace("/", "-"))


@pytest.mark.parametrize("end", [-512, -1024, -1536, -4096])
def test_a_pack_whose_archive_was_cut_before_its_end_is_refused_whole(
    packed: Path, tmp_path: Path, end: int
) -> None:
    bad, data = tmp_path / "bad.tar.xz", lzma.decompress(packed.read_bytes()).rstrip(b"\0")
    bad.write_bytes(lzma.compress(data[: len(data) // 512 * 512 + end]))
    with pytest.raises(InputError, match="it has no end, so it was cut"):
        unpack(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_packs_one_after_the_other_are_no_pack(packed: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.tar.xz"
    bad.write_bytes(2 * packed.read_bytes())
    with pytest.raises(InputError, match="something follows its end"):
        unpack(bad, tmp_path / "out")


def test_limits_hold_for_a_file_a_run_and_a_pack(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in (
        ("MOST_FILE_BYTES", 100),
        ("MOST_RUN_BYTES", 3000),
        ("MOST_FILES", 20),
        ("MOST_PACK_BYTES", 5000),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"results.pack.{name}", limit)
            with pytest.raises(InputError, match=f"more than .*{limit}"):
                unpack(packed, tmp_path / name)
            assert not (tmp_path / name).exists()


@pytest.mark.parametrize("file", ["config.yaml", "summary.json", "batches.csv/as-it-is"])
def test_a_member_that_is_no_text_is_one_sentence(packed: Path, tmp_path: Path, file: str) -> None:
    members = [item for item in members_of(packed) if item[0].startswith("atomic/")]
    table = file.partition("/")[0]
    kept = [item for item in members if not item[0].startswith(f"atomic/{table}")]
    write_members(tmp_path / "bad.tar.xz", [(f"atomic/{file}", b"\xff\xfe\0" * 9), *kept])
    with pytest.raises(InputError) as caught:
        find_runs([tmp_path / "bad.tar.xz"])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_run_is_not_unpacked_over_what_no_run_wrote(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "wcpb").mkdir()
    (tmp_path / "wcpb" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="wcpb: is there and no run directory; choose another --out"):
        unpack(packed, tmp_path)
    assert [item.name for item in (tmp_path / "wcpb").iterdir()] == ["thesis.tex"]
    assert len(unpack(packed, tmp_path / "new")) == len(unpack(packed, tmp_path / "new")) == 2


def test_two_processes_may_write_one_pack_at_a_time(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name, trace=False) for name in ("atomic", "wcpb")]
    command = [sys.executable, "-m", "results", "pack", *(str(run.path) for run in runs), "--out"]
    both = [subprocess.Popen([*command, str(tmp_path / "p.tar.xz")], cwd=ROOT) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert [run.policy for run in find_runs([tmp_path / "p.tar.xz"])[0]] == ["atomic", "wcpb"]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["atomic", "p.tar.xz", "wcpb"]


def test_a_field_longer_than_csv_likes_is_packed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "atomic", trace=False)
    text = (run.path / "requests.csv").read_text()
    (run.path / "requests.csv").write_text(text.replace(",0,,", f",0,{'x' * 200_000},", 1))
    csv.field_size_limit(131_072)
    pack([run], tmp_path / "p.tar.xz")
    (copy,) = find_runs([tmp_path / "p.tar.xz"])[0]
    assert (copy.path / "requests.csv").read_bytes() == (run.path / "requests.csv").read_bytes()
    assert copy.requests()["reason"].str.len().max() == 200_000
