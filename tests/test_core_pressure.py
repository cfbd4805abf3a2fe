"""Bad days, all at once and at random: clients hang up in any state, pools are too small, requests are
preempted, prefixes are shared, tokens leave early, under every policy. The nine invariants by an outside
checker.

`SCHEDULES` random schedules in all, as many as `RANDOM_SCHEDULES` says; a failing one names its seed, and
`draw_world(Random(seed))` makes it again.
"""

import os
from random import Random

import pytest
from hash_seeds import outputs_under_two_hash_seeds
from worlds import VARIANTS, draw_world

SCHEDULES = int(os.environ.get("RANDOM_SCHEDULES", "2000"))
PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules_keep_all_invariants_and_leave_nothing_allocated(part: int) -> None:
    names = list(VARIANTS)
    for seed in range(part, SCHEDULES, PARTS):
        world = draw_world(Random(seed))
        name = names[seed // PARTS % len(names)]
        name = name if world.allows(VARIANTS[name]) else "atomic"
        try:
            world.check(VARIANTS[name])
        except Exception as error:
            error.add_note(f"seed {seed}, policy {name}")
            raise


DETERMINISM = """
import sys
from random import Random
from worlds import VARIANTS, draw_world
for seed in range(140):
    world, policy = draw_world(Random(seed)), list(VARIANTS.values())[seed % len(VARIANTS)]
    result = world.run(policy if world.allows(policy) else VARIANTS["atomic"])
    sys.stdout.write(result.batches_csv + result.requests_csv)
"""


def test_logs_are_the_same_byte_for_byte_whatever_the_hash_seed() -> None:
    first, second = outputs_under_two_hash_seeds(DETERMINISM)
    assert len(first) > 100_000
    assert first == second
