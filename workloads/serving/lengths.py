"""How long answers get where nothing samples their tokens: an oracle of what requests imply."""

from policies.core.seam.request import Oracle
from workloads.drawn import Lengths
from workloads.rng import stream
from workloads.serving.inbox import LiveInbox
from workloads.synthetic import draw_lengths


class AnswerLengths(Oracle):
    """`max_tokens` of a request that ignores ends of sequence, or where `lengths` is None; else drawn from
    `lengths` by the run's seed and the request's id, and cut to `max_tokens`."""

    def __init__(self, inbox: LiveInbox, lengths: Lengths | None, seed: int) -> None:
        self._inbox, self._lengths, self._seed = inbox, lengths, seed

    def output_tokens(self, request_id: int) -> int:
        asked, lengths = self._inbox.asked(request_id), self._lengths
        if asked.ignore_eos or lengths is None:
            return asked.max_tokens
        if isinstance(lengths, tuple):
            lengths = lengths[request_id % len(lengths)]
        if not isinstance(lengths, int):
            lengths = draw_lengths(lengths, 1, stream(self._seed, "answers", request_id))[0]
        return min(lengths, asked.max_tokens)
