"""Random streams, one for each consumer, so that adding a consumer shifts no other."""

import zlib

import numpy as np


def stream(seed: int, name: str, *index: int) -> np.random.Generator:
    """The generator of consumer `name` (and `index`, where it has several) in a run with `seed`.

    The same three give the same numbers in every process: the name enters as its CRC-32, never as Python's
    salted hash.
    """
    return np.random.Generator(
        np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode()), *index]))
    )
