"""Arrival times as people write them, read as exact integer nanoseconds, without a float: only what is below
1 ns is dropped.

Numbers (relative or epoch; seconds, milliseconds and finer) and ISO 8601 with any number of fractional
digits. Only differences matter later: a reader rebases to the first arrival.
"""

import re
from datetime import date
from decimal import Decimal, InvalidOperation

NS_PER_UNIT = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
MAX_NS = 2**63 - 1
MAX_SPAN_NS = 2**62
"""Of a workload, 146 years: what happens after its last arrival has 64 bits, too."""
UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}

_ISO = re.compile(
    r"(\d{4})[-/](\d\d)[-/](\d\d)[T "
    r"](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d+))?)?\s*(?:(Z|UTC)|([+-])(\d\d)(?::?(\d\d))?)?",
    re.IGNORECASE | re.ASCII,
)
_EPOCH_DAY = date(1970, 1, 1).toordinal()


class TimestampError(ValueError):
    """Text that is not a usable time; the message says what was expected."""


def is_number(text: str) -> bool:
    """Whether `text` is written as a number, NaN and infinities included, rather than as a date."""
    return _decimal(text) is not None


def iso_ns(text: str) -> int:
    """Nanoseconds since 1970 of an ISO 8601 date and time; no offset is read as UTC.

    `2023-11-16 18:15:46.6805900` is 1,700,158,546,680,590,000. Digits below 1 ns are dropped. Raises
    `TimestampError`.
    """
    match = _ISO.fullmatch(text.strip())
    if match is None:
        raise TimestampError("expected a date and time like 2023-11-16 18:15:46.6805900 or a number")
    year, month, day, hour, minute, second, fraction, _zulu, sign, offset_hours, offset_minutes = (
        match.groups()
    )
    try:
        days = date(int(year), int(month), int(day)).toordinal() - _EPOCH_DAY
    except ValueError as error:
        raise TimestampError(f"expected a date that exists ({error})") from None
    hours, minutes, seconds = int(hour), int(minute), int(second or 0)
    if hours > 23 or minutes > 59 or seconds > 59:
        raise TimestampError("expected a time of day from 00:00:00 to 23:59:59")
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if sign is not None:
        offset = int(offset_hours) * 3600 + int(offset_minutes or 0) * 60
        total += offset if sign == "-" else -offset
    total_ns = total * 10**9 + int((fraction or "")[:9].ljust(9, "0"))
    if abs(total_ns) > MAX_NS:
        raise TimestampError("expected a date from 1678 to 2261")
    return total_ns


def number_ns(text: str, unit: str) -> int:
    """Nanoseconds of a number written in `unit`: `"0.1234567891"` seconds is 123,456,789. Raises
    `TimestampError`.

    Missing, NaN, infinite and negative values are refused: a request cannot have arrived at such a time.
    """
    if text.isascii() and text.isdigit() and len(text) < 20:
        total = int(text) * NS_PER_UNIT[unit]
    else:
        value = _decimal(text)
        if value is None:
            raise TimestampError(f"expected a number of {UNIT_NAMES[unit]}")
        if not value.is_finite() or value < 0:
            raise TimestampError(f"expected a finite number of {UNIT_NAMES[unit]} that is not negative")
        total = MAX_NS + 1 if value.adjusted() > 20 else int(value * NS_PER_UNIT[unit])
    if total > MAX_NS:
        raise TimestampError(f"expected at most {MAX_NS} ns, 292 years")
    return total


def guess_unit(text: str, default: str) -> str:
    """The unit of a trace's first number: by its size when it can only be an epoch time (1973 to 2286), else
    `default`.

    1700158546 is seconds, 1700158546680 milliseconds, 1700158546680590 microseconds; 27499 is whatever the
    format says.
    """
    value = _decimal(text)
    if value is None or not value.is_finite():
        return default
    return {9: "s", 11: "ms", 12: "ms", 14: "us", 15: "us", 17: "ns", 18: "ns"}.get(value.adjusted(), default)


def _decimal(text: str) -> Decimal | None:
    """`text` as a decimal number (NaN and infinities are some), or None; unlike Python, `1_000` is none."""
    try:
        return None if "_" in text else Decimal(text)
    except InvalidOperation:
        return None
