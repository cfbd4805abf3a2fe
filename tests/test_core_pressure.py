"""Bad days, at once and at random: clients hang up in any state, over all policies. The nine invariants by an outside checker.

`SCHEDULES` random schedules in all; a failing one names its seed, and `draw_world(Random(seed))` makes it again.
"""

from random import Random

import pytest
from worlds import VARIANTS, draw_world

SCHEDULES = 10_000
PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules_keep_all_invariants_and_leave_nothing_allocated(part: int) -> None:
    names = list(VARIANTS)
    for seed in range(part, SCHEDULES, PARTS):
        name = names[seed // PARTS % len(names)]
        try:
            draw_world(Random(seed)).check(VARIANTS[name])
        except Exception as error:
            error.add_note(f"seed {seed}, policy {name}")
            raise
