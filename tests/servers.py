"""A server of either world in a process of its own, for tests: started, asked over HTTP, drained."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
CONFIG = """\
model: ouro-tiny
policy: wcpb
scheduler: {max_num_seqs: 4, max_num_batched_tokens: 64, prefill_chunk_size: 16, inflight: 2}
cache: {num_blocks: 400}
workload: {kind: live, max_context: 256}
"""


class Served:
    """A server that runs. After `stop` its run directory is whole."""

    def __init__(self, process: "subprocess.Popen[str]", out: Path) -> None:
        self.process, self.out = process, out
        self.lines: list[str] = []
        found = None
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append(line)
            found = re.match(r"serving (\S+) at (http://\S+)/v1", line)
            if found:
                break
        assert found, "".join(self.lines)
        self.model, self.url = found.groups()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.client = httpx.Client(base_url=self.url, timeout=30)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    def ask(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json=body)

    def stop(self, *signals: int) -> int:
        """Send `signals` (SIGTERM where none is named) and wait; return the exit status."""
        self.client.close()
        for number in signals or (signal.SIGTERM,):
            self.process.send_signal(number)
        status = self.process.wait(30)
        self._reader.join(5)
        return status

    def summary(self) -> dict[str, Any]:
        return json.loads((self.out / "summary.json").read_text())


@contextmanager
def served(world: str, folder: Path, *options: str, config: str = CONFIG) -> Iterator[Served]:
    """`python -m WORLD serve` of `config` in `folder`, killed at the end if it still runs."""
    path, out = folder / "serve.yaml", folder / "run"
    path.write_text(config)
    command: Sequence[str] = [
        sys.executable, "-m", world, "serve", str(path), "--port", "0", "--out", str(out), "--no-plots",
        *options,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        yield Served(process, out)
    finally:
        process.kill()
        process.wait()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a streamed answer, without its end."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
