"""What `sim transfer` prints: the error of scaling one device to another card, where both ends are known."""

import sys

from policies.costs.models import load_device
from policies.costs.transfer import known_errors
from results.table import plain_table, print_whole

LEGEND = (
    "Device time of standard batches (one depth, 1 to 1,024 rows over contexts of 256 to 8,064 tokens), "
    "predicted / known - 1. On the same card nothing is transferred: that line is what other kernels make. "
    "a100-seed is another engine with other kernels, so its lines say more of engines than of cards; no "
    "card but the H200 was profiled with these."
)


def print_known_errors() -> None:
    table = plain_table(None)
    for name in ("from", "to the card", "against", "batches"):
        table.add_column(name, no_wrap=True)
    for name in ("median", "least", "most", "all together"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in known_errors(load_device):
        card = f"{item.card} (the same)" if item.is_same_card else item.card
        figures = (item.median, item.least, item.most, item.total)
        table.add_row(
            item.known, card, item.truth, str(item.num_batches), *(f"{value:+.1%}" for value in figures)
        )
    print_whole(table, sys.stdout)
    print(LEGEND)
