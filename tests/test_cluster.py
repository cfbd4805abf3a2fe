"""Cells on a Dask cluster: a real scheduler and two workers on loopback."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.cli import main

pytest.importorskip("distributed", reason="needs the extra cluster")
ROOT = Path(__file__).parent.parent
BASE: dict[str, Any] = {
    "model": "ouro-tiny", "device": "h200",
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
    "workload": {"kind": "synthetic", "num_requests": 40, "arrival": {"process": "poisson", "rate": 300},
                 "prompt_tokens": [70, 5], "output_tokens": [4, 9]},
}  # fmt: skip


@contextmanager
def cluster(num_workers: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """`dask://...` of a scheduler in processes of its own, and its workers, which nobody restarts."""
    code = (
        "import asyncio, sys\nfrom distributed import Scheduler\n"
        "async def main():\n"
        "    async with Scheduler(host='127.0.0.1', port=0, dashboard=False) as one:\n"
        "        print(one.address, flush=True)\n        await one.finished()\n"
        "asyncio.run(main())\n"
    )
    worker = (
        "import asyncio, sys\nfrom distributed import Worker\n"
        "async def main():\n"
        "    async with Worker(sys.argv[1], nthreads=1, host='127.0.0.1', dashboard=False) as one:\n"
        "        await one.finished()\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    scheduler = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert scheduler.stdout is not None
    address = scheduler.stdout.readline().decode().strip()
    workers = [
        subprocess.Popen([sys.executable, "-c", worker, address], env=environment, stderr=subprocess.DEVNULL)
        for _ in range(num_workers)
    ]
    try:
        yield address.replace("tcp://", "dask://"), workers
    finally:
        for process in (*workers, scheduler):
            process.kill()
            process.wait()


def sweep_file(folder: Path, seeds: int) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": BASE, "grid": {"seed": [*range(seeds)]}}))
    return path


def test_a_sweep_on_two_workers_is_that_of_this_process_and_a_worker_that_dies_costs_its_cells_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sweep_file(tmp_path, 4)
    with cluster(2) as (address, workers):
        wait_for_workers(address, 2)

        def kill_one() -> None:
            while not list((tmp_path / "far").glob("cells/*/config.yaml")):
                time.sleep(0.005)
            workers[0].send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill_one)
        killer.start()
        common = ["sweep", str(path), "--log", "none"]
        assert main([*common, "--cluster", address, "--out", str(tmp_path / "far")]) == 0
        killer.join()
        workers[0].wait()
        far = capsys.readouterr().out
    assert main([*common, "--jobs", "1", "--out", str(tmp_path / "near")]) == 0
    assert capsys.readouterr().out == far
    for summary in (tmp_path / "far").glob("cells/*/summary.json"):
        twin = tmp_path / "near" / summary.relative_to(tmp_path / "far")
        assert summary.read_bytes() == twin.read_bytes()


def wait_for_workers(address: str, count: int) -> None:
    from distributed import Client

    with Client(address.replace("dask://", "tcp://"), set_as_default=False) as client:  # type: ignore[no-untyped-call]
        client.wait_for_workers(count, timeout=60)  # type: ignore[no-untyped-call]


def test_a_cluster_that_does_not_answer_and_one_without_workers_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.cluster.ANSWER_S", 0.5)
    path = sweep_file(tmp_path, 1)
    for address, sentence in (
        ("dask://127.0.0.1:9", "--cluster dask://127.0.0.1:9: no scheduler answers there within 0.5 s"),
        ("tcp://127.0.0.1:9", "expected dask://HOST:PORT of a running scheduler"),
        ("dask://127.0.0.1", "expected dask://HOST:PORT of a running scheduler"),
    ):
        assert main(["sweep", str(path), "--cluster", address, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert sentence in error and len(error.splitlines()) == 1
    with cluster(0) as (address, _):
        assert main(["sweep", str(path), "--cluster", address, "--out", str(tmp_path / "out")]) == 2
        assert "has no workers, expected some started by `dask worker`" in capsys.readouterr().err


def test_other_source_and_other_versions_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from policies.core.errors import InputError
    from sim import cluster as ours

    class Client:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def run(self, function: Any, token: str, on_error: str) -> dict[str, Any]:
            return {"tcp://far:1": self.answer(*function(token))}

    def check(answer: Any) -> None:
        ours._check(Client(answer), "dask://far:2", tmp_path)

    check(lambda source, sees, libraries: (source, sees, libraries))
    assert capsys.readouterr().err == ""
    check(lambda source, sees, libraries: (source, sees, {**libraries, "numpy": "1.0"}))
    assert "note: tcp://far:1 has numpy 1.0 (" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"runs other source than this"):
        check(lambda source, sees, libraries: ("0" * 64, sees, libraries))
    with pytest.raises(InputError, match=r"does not see .*, expected a folder that all share"):
        check(lambda source, sees, libraries: (source, False, libraries))
    with pytest.raises(InputError, match="cannot import this project"):
        check(lambda source, sees, libraries: (None, sees, libraries))
    assert not list(tmp_path.iterdir())
