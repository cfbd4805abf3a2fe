"""Runs one script in two processes that hash strings differently."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def outputs_under_two_hash_seeds(script: str) -> tuple[bytes, bytes]:
    """What `script` prints under PYTHONHASHSEED 0 and 4242; it may import the project and the tests' own
    modules."""
    script = f"import sys\nsys.path[:0] = {[str(TESTS), str(TESTS.parent)]!r}\n{script}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE
        )
        for seed in ("0", "4242")
    ]
    first, second = (process.communicate(timeout=120)[0] for process in started)
    assert all(process.returncode == 0 for process in started)
    return first, second
