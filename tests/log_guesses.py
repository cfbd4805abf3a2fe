"""The checker's account of guessed tokens: one frontier per depth over all tokens of a request, prompt and
output alike, and what a refused guess takes back (invariant 2 where tokens are guessed).

Tokens `[0, done[d])` of a request have run depth d, those in `[0, made)` have their true successors made, and
those in `[0, guessed)` are known or guessed. Refusing the guess behind token p sets all frontiers to p + 1.
"""

from log_reader import Batch, Broken, Range, Rules, Track


def begin(track: Track) -> None:
    """The prompt is done: its last token waits for the LM head."""
    track.expects = "GUESSING"
    track.made, track.guessed = track.prompt_end - 1, track.prompt_end
    track.ranks, track.ran = {}, {}


def fed_end(track: Track) -> int:
    """The last token is never fed back."""
    return track.prompt_tokens + track.max_tokens - 1


def check_row(track: Track, item: Range, batch: Batch, rules: Rules) -> None:
    """A decode row against all that was formed before it, rows of the same batch included; then counts."""
    at, where = item.start, f"batch {batch.seq}: {item}"
    if track.expects != "GUESSING" or item.count != 1:
        raise Broken(2, f"{where}, request {track.request_id} is at {track.expects}")
    if item.stage == "RECURRENT":
        boundary = rules.draft_loops if item.depth < rules.draft_loops else rules.num_loops
        if item.depth + batch.loops > boundary:
            raise Broken(2, f"{where} runs past {boundary} loops, where it is at the LM head")
        ahead = track.guessed if item.depth == 0 else track.done[item.depth - 1]
        if at >= ahead or any(
            track.done[depth] != at for depth in range(item.depth, item.depth + batch.loops)
        ):
            raise Broken(2, f"{where}, known or guessed are {track.guessed}, depths done {track.done}")
        for depth in range(item.depth, item.depth + batch.loops):
            track.done[depth] = at + 1
    elif item.stage == "DRAFT":
        rank = at + 1 - track.made
        has_run = [done > at for done in track.done] == [
            depth < rules.draft_loops for depth in range(rules.num_loops)
        ]
        if at + 1 != track.guessed or not has_run or item.depth != rank or at + 1 >= fed_end(track):
            raise Broken(2, f"{where}, made are {track.made}, guessed {track.guessed}, done {track.done}")
        if rank > rules.max_guesses:
            raise Broken(2, f"{where} guesses {rank} tokens ahead of {rules.max_guesses}")
        track.guessed, track.ranks[at + 1] = at + 2, rank
    else:
        rank = track.ranks[at + 1] if track.guessed > at + 1 else 0
        stage = "VERIFY" if rank else "CODA"
        if at != track.made or at >= track.done[-1] or (item.stage, item.depth) != (stage, rank):
            raise Broken(2, f"{where}, expected {stage} of {track.made}, rank {rank}; done {track.done}")
        track.made = at + 1
        track.guessed = max(track.guessed, min(at + 2, fed_end(track)))
    track.last_seq = batch.seq
    if track.made == fed_end(track):
        track.expects = "NO_TRANSFERS"


def check_boundaries(batch: Batch, rules: Rules) -> None:
    """Rows at different depths run one loop, or until the first is at the LM head, or through the prompt."""
    if batch.loops > 1 and batch.stage == "RECURRENT":
        ends = [
            item.depth + batch.loops in ((rules.num_loops,) if item.is_prompt else rules.head_loops)
            for item in batch.ranges
        ]
        if not any(ends):
            raise Broken(2, f"batch {batch.seq} stops after {batch.loops} depths, where no row must")


def collected(track: Track, item: Range) -> None:
    """A batch with a row that counts is collected."""
    track.ran[item.start] = track.ran.get(item.start, 0) + 1


def refuse(track: Track, position: int, seq: int) -> int:
    """What is behind `position` was in vain: all frontiers go back; return how many rows that were."""
    in_vain = forget(track, position)
    track.done = [position + 1] * len(track.done)
    track.made, track.guessed, track.expects = position + 1, position + 2, "GUESSING"
    track.surplus_until = max(track.last_seq, seq)
    return in_vain


def forget(track: Track, position: int) -> int:
    """Guesses behind `position` are given up; return how many collected rows they had."""
    in_vain = sum([count for at, count in track.ran.items() if at > position])
    track.ran = {at: count for at, count in track.ran.items() if at <= position}
    track.ranks = {at: rank for at, rank in track.ranks.items() if at <= position}
    track.guessed = min(track.guessed, position + 1)
    track.done = [min(done, position + 1) for done in track.done]
    return in_vain
