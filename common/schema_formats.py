r"""JSON Schema's formats as regular expressions (Rust's syntax) that a whole text matches.

Each lets through only what its RFC allows; some leave out what nobody writes (a leap second, an IPv6
address with an IPv4 tail, comments in an e-mail address).
"""

from __future__ import annotations

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_DURATION_TIME = "T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
_DURATION_DATE = (
    "(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"
)
_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_H16 = "[0-9A-Fa-f]{1,4}"
_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]{1,15}"
_URI_CHAR = "(?:[0-9A-Za-z._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_USER_CHAR = "(?:[0-9A-Za-z._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})"


def _ipv6() -> str:
    whole = f"(?:{_H16}:){{7}}{_H16}"
    short = [
        f"(?:{_H16}(?::{_H16}){{0,{before - 1}}})?::" if before else "::" for before in range(7)
    ]
    tails = [f"(?:{_H16}(?::{_H16}){{0,{6 - before}}})?" for before in range(7)]
    return "(?:" + "|".join([whole, *(head + tail for head, tail in zip(short, tails, strict=True))]) + ")"


FORMAT_REGEX: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]{{1,9}}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,3}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": _ipv6(),
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:{_USER_CHAR}*@)?{_HOST}(?::[0-9]{{1,5}})?(?:/{_URI_CHAR}*)*"
        rf"|/?{_URI_CHAR}+(?:/{_URI_CHAR}*)*)(?:\?(?:{_URI_CHAR}|[/?])*)?(?:#(?:{_URI_CHAR}|[/?])*)?"
    ),
}
"""As many as ``schema_keywords.FORMATS``."""
