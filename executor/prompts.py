"""Token ids of prompts. Traces carry lengths and content ids, so token ids are drawn from the run's seed."""

import numpy as np

from policies.core.seam.request import Request

CONTENT = 0x636F6E74
"""Second word of the seeds of content ids; no request has so high an id."""


def prompt_ids(seed: int, request: Request, vocab_size: int) -> np.ndarray:
    """[prompt_tokens] int32 ids, the same for a request whatever the policy and the order of admission.

    Equal content ids are equal tokens in every request; what no content id covers comes from the request's
    own id.
    """
    stream = np.random.default_rng(np.random.SeedSequence([seed, request.request_id]))
    ids = stream.integers(0, vocab_size, request.prompt_tokens, dtype=np.int32)
    for at, content_id in enumerate(request.content_ids):
        start = at * request.content_tokens
        said = np.random.default_rng(np.random.SeedSequence([seed, CONTENT, content_id + 1]))
        end = min(start + request.content_tokens, request.prompt_tokens)
        if end > start:
            ids[start:end] = said.integers(0, vocab_size, request.content_tokens, dtype=np.int32)[
                : end - start
            ]
    return ids
