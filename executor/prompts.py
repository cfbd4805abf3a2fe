"""Token ids of prompts. Traces carry lengths only, so ids are drawn from the run's seed and the request's id."""

import numpy as np


def prompt_ids(seed: int, request_id: int, prompt_tokens: int, vocab_size: int) -> np.ndarray:
    """[prompt_tokens] int32 ids, the same for a request whatever the policy and the order of admission."""
    stream = np.random.default_rng(np.random.SeedSequence([seed, request_id]))
    return stream.integers(0, vocab_size, prompt_tokens, dtype=np.int32)
