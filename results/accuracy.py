"""How many answers of a run are right, as its summary says it, in a table beside others."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from results.identity import policy_label


def print_accuracy(summaries: Sequence[Mapping[str, Any]]) -> None:
    """A line for each run that had answers to compare with; nothing where none had."""
    found = [summary for summary in summaries if summary.get("accuracy")]
    if not found:
        return
    table = Table("workload", "policy", "chunk", "answers", "correct", "accuracy", title="last number equal")
    for summary in found:
        answers, correct = summary["accuracy"]["num_answers"], summary["accuracy"]["num_correct"]
        table.add_row(
            str(summary["workload"]),
            policy_label(summary),
            str(summary["prefill_chunk_size"]),
            str(answers),
            str(correct),
            f"{100 * correct / answers:.1f} %",
        )
    Console(width=140).print(table)
