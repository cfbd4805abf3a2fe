"""Numbers drawn by what they are for: the same for the same key, whatever else is drawn and when."""

MIX_1, MIX_2, GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def draw(*key: int) -> float:
    """A number in [0, 1) of 53 random bits that follows from `key` alone."""
    bits = 0
    for value in key:
        bits = _mix(bits + value + GOLDEN)
    return (bits >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every bit of the result depends on every bit of `value`."""
    value &= MASK
    value = (value ^ (value >> 30)) * MIX_1 & MASK
    value = (value ^ (value >> 27)) * MIX_2 & MASK
    return value ^ (value >> 31)
