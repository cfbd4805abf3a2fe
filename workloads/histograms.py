"""ServeGen's length histograms: strings such as `"{50: 0.25, 51: 0.75}"` inside a JSON file, parsed as text
and never evaluated."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from policies.core.errors import InputError
from policies.process.documents import MAX_JSON_BYTES, parse_json
from workloads.drawn import MAX_TOKENS
from workloads.textfile import open_text


class Histogram(NamedTuple):
    """Token counts and how likely each is; probabilities need not add up to exactly 1."""

    values: Sequence[int]
    weights: Sequence[float]


class Histograms:
    """Prompt and output histograms by window. A window without data borrows the nearest earlier one's, else
    the next one's."""

    def __init__(
        self, starts_s: Sequence[float], prompts: Sequence[Histogram], outputs: Sequence[Histogram]
    ) -> None:
        self._starts_s = starts_s
        self._pairs = list(zip(prompts, outputs, strict=True))
        self._filled = [index for index, pair in enumerate(self._pairs) if all(item.values for item in pair)]
        self._borrowed: dict[int, int] = {}

    def at(self, time_s: float) -> tuple[Histogram, Histogram]:
        """Prompt and output histograms that hold at `time_s`, in seconds from the start of the trace."""
        index = max(bisect_right(self._starts_s, time_s) - 1, 0)
        place = max(bisect_right(self._filled, index) - 1, 0)
        lender = self._filled[place]
        if lender != index:
            self._borrowed[index] = lender
        return self._pairs[lender]

    def notes(self) -> list[str]:
        """A sentence if any window that was asked for had no data."""
        if not self._borrowed:
            return []
        return [
            f"{len(self._borrowed)} windows have arrivals but no length histogram and borrow a neighbour's"
        ]


def read_dataset(path: Path) -> Histograms:
    """The histograms of a ServeGen `*-dataset.json`. Raises `InputError` naming file, window, key and
    text."""
    with open_text(path) as text:
        content = text.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise InputError(f"{path}: is larger than {MAX_JSON_BYTES:,} characters, expected length histograms")
    data = parse_json(content, str(path))
    if not isinstance(data, dict) or not data:
        raise InputError(
            f"{path}: expected an object keyed by window start in seconds, found {ascii(data)[:40]}"
        )
    windows = sorted((_start(path, key), key) for key in data)
    prompts, outputs = (
        [_histogram(path, key, name, data[key]) for _, key in windows]
        for name in ("input_tokens", "output_tokens")
    )
    histograms = Histograms([start for start, _ in windows], prompts, outputs)
    if not any(prompt.values and output.values for prompt, output in zip(prompts, outputs, strict=True)):
        raise InputError(f"{path}: no window has both lengths, expected at least one")
    return histograms


def _start(path: Path, key: str) -> float:
    try:
        start_s = float(key)
    except ValueError:
        start_s = math.nan
    if not 0 <= start_s < math.inf:
        raise InputError(f"{path}: window {key!a}: expected a start in seconds, a number from 0 on")
    return start_s


def _histogram(path: Path, key: str, name: str, window: object) -> Histogram:
    text = window.get(name) if isinstance(window, dict) else None
    where = f"{path}: window {key}: {name}"
    if not isinstance(text, str):
        raise InputError(
            f"{where}: {'missing' if text is None else ascii(text)[:40]}, expected text like '{{50: 0.25, "
            f"51: 0.75}}'"
        )
    body = text.strip()
    if not (body.startswith("{") and body.endswith("}")):
        raise InputError(f"{where}: {ascii(text)[:40]}, expected text like '{{50: 0.25, 51: 0.75}}'")
    values, weights = [], []
    for item in body[1:-1].split(",") if body[1:-1].strip() else []:
        value, _, weight = item.partition(":")
        try:
            tokens, probability = int(value), float(weight)
        except ValueError:
            tokens, probability = -1, math.nan
        if not (0 <= tokens <= MAX_TOKENS and 0 <= probability < math.inf):
            raise InputError(
                f"{where}: {ascii(item.strip())[:40]}, expected 'tokens: probability', both from 0 on"
            )
        values.append(tokens)
        weights.append(probability)
    if values and not sum(weights) > 0:
        raise InputError(f"{where}: probabilities add up to 0, expected about 1")
    return Histogram(values, weights)
