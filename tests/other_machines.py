"""`python tests/other_machines.py [TEST...]`: the tests that multiply, under settings that make a BLAS behave
like another machine's, and under one that is as bad as may be. Many minutes; not a part of `make test`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
SETTINGS: tuple[dict[str, str], ...] = (
    {"SCRAMBLE_PRODUCTS": "1"},
    {},
    {"OMP_NUM_THREADS": "1"},
    {"OMP_NUM_THREADS": "2"},
    {"OPENBLAS_CORETYPE": "Haswell", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"OPENBLAS_CORETYPE": "Zen", "MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"},
    {"OPENBLAS_CORETYPE": "SkylakeX", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    {"OPENBLAS_CORETYPE": "Prescott", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
)


def main(chosen: list[str]) -> int:
    files = chosen or [str(path) for path in sorted(TESTS.glob("test_*.py")) if "torch" in path.read_text()]
    failed = False
    for setting in SETTINGS:
        name = " ".join(f"{key}={value}" for key, value in setting.items()) or "as it is"
        found = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files],
            cwd=TESTS.parent,
            env=os.environ | setting,
            capture_output=True,
            text=True,
        )
        if found.returncode == -signal.SIGILL:
            print(f"{name}: this CPU has no such instructions")
            continue
        lines = (found.stdout or found.stderr).strip().splitlines()
        print(f"{name}: status {found.returncode}", *(line for line in lines if line.startswith("FAILED")))
        failed = failed or found.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
