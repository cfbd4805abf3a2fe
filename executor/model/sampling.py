"""From logits to token ids, on the device, row by row: a row's token never depends on the batch it is sampled
in.

Sampling adds Gumbel noise to the scaled logits and takes the largest. The noise of (row seed, token id) comes
from a counter-based hash, not from a stream that rows share. top-p's cumulative sum is taken over integers,
which is exact in any order.
"""

from dataclasses import dataclass

import torch

GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1
FIXED_POINT = 2.0**40


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Settings of every row. Temperature 0 is greedy, top_k 0 and top_p 1 keep every token; `seeds` come from
    `row_seed`."""

    temperature: torch.Tensor  # [rows] float32
    top_k: torch.Tensor  # [rows] int32
    top_p: torch.Tensor  # [rows] float32, in (0, 1]
    seeds: torch.Tensor  # [rows] int64

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.temperature, self.top_k, self.top_p, self.seeds)

    def first(self, rows: int) -> "SamplingRows":
        """Views of the first rows."""
        return SamplingRows(*(tensor[:rows] for tensor in self.tensors()))


SAMPLING_DTYPES = (torch.float32, torch.int32, torch.float32, torch.int64)
"""Of the fields of `SamplingRows`."""


def row_seed(seed: int, request_id: int, position: int) -> int:
    """The seed of the token that follows `position` of a request: a signed 64-bit integer, the same in every
    batch and policy."""
    state = 0
    for value in (seed, request_id, position):
        state = _mix_int((state + value + GOLDEN) & MASK)
    return state - (1 << 64) if state >> 63 else state


def greedy(logits: torch.Tensor, out: torch.Tensor) -> None:
    """The first largest token of every row: logits [rows, vocab] to out [rows] int32."""
    out.copy_(logits.argmax(dim=1))


def sample(logits: torch.Tensor, rows: SamplingRows, out: torch.Tensor) -> None:
    """Draw a token of every row: logits [rows, vocab] to out [rows] int32. top-k cuts before top-p, which
    renormalises. A row at temperature 0 gets what `greedy` gives it."""
    wide = logits.double()
    is_random = (rows.temperature > 0)[:, None]
    scaled = wide / torch.where(is_random, rows.temperature.double()[:, None], 1.0)
    descending, order = scaled.sort(dim=1, descending=True, stable=True)
    vocab = logits.shape[1]
    top_k = torch.where(rows.top_k > 0, rows.top_k, vocab)[:, None]
    kept = torch.arange(vocab, device=logits.device)[None] < top_k
    weight = ((descending - descending[:, :1]).exp() * FIXED_POINT).long() * kept
    before = weight.cumsum(1) - weight
    # at top_p 1 everything stays, tokens whose weight rounds to zero included
    top_p = rows.top_p.double()[:, None]
    kept &= (before < top_p * weight.sum(1, keepdim=True)) | (top_p >= 1.0)
    is_candidate = torch.zeros_like(kept).scatter_(1, order, kept)
    noise = torch.where(is_random, _gumbel(rows.seeds, vocab), 0.0)
    drawn = (scaled + noise).masked_fill_(~is_candidate, float("-inf")).argmax(dim=1)
    out.copy_(torch.where(is_random[:, 0], drawn, logits.argmax(dim=1)))


def _gumbel(seeds: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise [rows, vocab] float64 of (seed, token id)."""
    bits = seeds[:, None] + torch.arange(vocab, device=seeds.device)[None] * _signed(GOLDEN)
    bits = (bits ^ _shift_right(bits, 30)) * _signed(MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(MIX_2)
    bits = bits ^ _shift_right(bits, 31)
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift; torch's own on int64 copies the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix_int(value: int) -> int:
    value = (value ^ (value >> 30)) * MIX_1 & MASK
    value = (value ^ (value >> 27)) * MIX_2 & MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
