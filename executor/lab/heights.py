"""What decode rows cost beside a prompt chunk, and the chunk beside them.

`python -m executor.lab.heights` prints one line per batch; run it from two checkouts to compare kernels.
"""

from pathlib import Path

from executor.lab.bench import print_timings, time_cases
from executor.lab.profiling.cases import Case, decode_case, mixed_case, prompt_case
from executor.session import Session
from policies.config.runconfig import load_config

CONFIG = Path(__file__).parents[1] / "configs" / "heights.yaml"
DECODE, CONTEXT = 60, 1200
CHUNKS = (16, 32, 64, 65, 96, 128, 256, 512)
"""Rows of the chunk from 1200 on that lies beside 60 decode rows at 1200."""
OTHERS = ((31, 4096, 64), (31, 4096, 128), (28, 600, 128), (8, 2000, 512), (2, 2000, 512))
"""Decode rows, their context, and rows of a chunk that begins there."""


def cases() -> list[Case]:
    beside = [mixed_case(DECODE, CONTEXT, chunk, CONTEXT) for chunk in CHUNKS]
    others = [mixed_case(decode, context, chunk, context) for decode, context, chunk in OTHERS]
    return [decode_case(DECODE, CONTEXT), prompt_case(1, 64, CONTEXT + 64), *beside, *others]


def main() -> None:
    session = Session([load_config(CONFIG)], "cuda")
    print_timings(time_cases(session, cases()))


if __name__ == "__main__":
    main()
