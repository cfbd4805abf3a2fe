"""How every request must have ended by the log alone (invariants 6 and 7)."""

from log_holdings import Holdings
from log_reader import Broken, Track


class Ends(Holdings):
    """What is left to say once all batches are collected."""

    def _check_refusals(self) -> None:
        """Exactly the requests that can never fit are refused, with a reason."""
        for track in self.tracks.values():
            fits = self._groups(track) <= self.rules.num_groups
            fits = fits and track.prompt_tokens + track.max_tokens <= self.rules.max_context_tokens
            if fits == (track.status == "refused") or fits != (track.reason == ""):
                what = "it can fit" if fits else "it can never fit"
                raise Broken(7, f"request {track.request_id} is {track.status} ({track.reason}), {what}")

    def _check_end(self, track: Track) -> None:
        """Invariant 7: it ended once, with the tokens it should have; and its own times are in order (6)."""
        who = f"request {track.request_id}"
        if track.status == "refused":
            if (
                track.last_seq >= 0
                or track.output_tokens
                or track.finished_ns is None
                or track.finished_ns < track.arrival_ns
            ):
                raise Broken(7, f"{who} was refused and ran, or has no end")
            return
        if track.times_preempted != track.preemptions:
            raise Broken(
                7, f"{who} was preempted {track.times_preempted} times, told are {track.preemptions}"
            )
        is_cancelled = track.status == "cancelled"
        if (
            track.status not in ("cancelled", "sent" if self.rules.role == "prefill" else "finished")
            or not track.is_ended
            or track.request_id in self._running
        ):
            raise Broken(7, f"{who} is {track.status} with {track.output_tokens} tokens delivered")
        least = 0 if is_cancelled or self.rules.role == "prefill" else 1
        if not least <= track.delivered == track.output_tokens == len(track.token_ns) <= track.max_tokens:
            raise Broken(
                7,
                f"{who} has {track.output_tokens} tokens, {len(track.token_ns)} times, max_tokens "
                f"{track.max_tokens}",
            )
        if self.rules.outputs is not None and self.rules.role != "prefill":
            expected = min(self.rules.outputs.get(track.request_id, track.max_tokens), track.max_tokens)
            if track.output_tokens != expected and not (is_cancelled and track.output_tokens < expected):
                raise Broken(7, f"{who} ended after {track.output_tokens} tokens, the oracle says {expected}")
        scheduled = (
            [] if is_cancelled and track.first_scheduled_ns is None else [track.first_scheduled_ns or 0]
        )
        times = [track.arrival_ns, *scheduled, *track.token_ns, track.finished_ns or 0]
        if times != sorted(times) or (track.status == "finished" and track.finished_ns != track.token_ns[-1]):
            raise Broken(6, f"{who}: arrival, first scheduled, tokens, finish at {times} ns")

    def _check_concurrency(self) -> None:
        """A closed loop never has more requests outstanding than its clients."""
        if self.rules.concurrency is None:
            return
        spans = [
            (t.arrival_ns, t.finished_ns or 0) for t in self.tracks.values() if t.finished_ns != t.arrival_ns
        ]
        edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
        outstanding = 0
        for at_ns, step in edges:
            outstanding += step
            if outstanding > self.rules.concurrency:
                raise Broken(
                    7,
                    f"{outstanding} requests outstanding at {at_ns} ns, concurrency is "
                    f"{self.rules.concurrency}",
                )
