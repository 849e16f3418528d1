"""Frames for the fuzzing of inboxes: garbage, mutilated messages, and messages of the right types with any values."""

from __future__ import annotations

from typing import Any

import msgspec
import msgspec.inspect as mi
from hypothesis import strategies as st

from tests.wire.samples import SAMPLES

NAMES = st.sampled_from(["gateway-0"] * 4 + ["gateway-1f@web1"] * 2 + ["../../x", "", "gateway-0\n", "a" * 97])
RIDS = st.sampled_from(["a"] * 4 + ["b", "c", "", "\0", "health-x", "\ud7ff", "x" * 300])

_BY_NAME = {"rid": RIDS, "gateway": NAMES}


def garbage() -> st.SearchStrategy[bytes]:
    """Bytes that nobody meant: random, nested without end, lengths that promise gigabytes."""
    deep = st.builds(lambda byte, n: byte * n, st.sampled_from([b"\x91", b"\x81\xa1a"]), st.integers(1, 20_000))
    promises = st.sampled_from(
        [b"\xdd\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01",
         b"\x81\xa4type\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff" + b"x" * 64]
    )  # fmt: skip
    return st.one_of(st.binary(max_size=200), deep, promises)


def mutilated(types: Any) -> st.SearchStrategy[bytes]:
    """A message of the inbox, cut off, with bytes changed, or with something nested deep inside it."""
    valid = [msgspec.msgpack.encode(sample) for sample in SAMPLES if _fits(sample, types)]
    assert valid

    def change(frame: bytes, position: int, new: bytes, cut: int) -> bytes:
        at = position % len(frame)
        return (frame[:at] + new + frame[at + len(new) :])[: len(frame) + len(new) - cut % len(frame)]

    inside = st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from([b"\x91" * 5000, b"\xdd\x7f\xff\xff\xff"]))
    return st.builds(change, st.sampled_from(valid), st.integers(0, 10_000), inside, st.integers(0, 10_000))


def _fits(sample: Any, types: Any) -> bool:
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=types)
    except msgspec.ValidationError:
        return False
    return True


def messages(types: Any) -> st.SearchStrategy[Any]:
    """Decoded messages of an inbox whose fields have the right types and any values."""
    info = mi.type_info(types)
    options = info.types if isinstance(info, mi.UnionType) else (info,)
    return st.one_of([_struct(option) for option in options if isinstance(option, mi.StructType)])


def _struct(info: mi.StructType) -> st.SearchStrategy[Any]:
    fields = {}
    for one in info.fields:  # names that occur elsewhere too, so that messages speak of the same things
        strategy = _BY_NAME[one.name] if one.name in _BY_NAME else _any_of(one.type)
        if not one.required:  # often left at its default
            default = one.default if one.default is not msgspec.NODEFAULT else one.default_factory()
            strategy = st.one_of(st.just(default), strategy)
        fields[one.name] = strategy
    return st.fixed_dictionaries(fields).map(lambda values: info.cls(**values))


_TEXT = st.text(max_size=12)
_INTS = st.one_of(st.integers(-3, 40), st.sampled_from([2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 2**64 - 1]))
_FLOATS = st.one_of(st.floats(), st.sampled_from([0.0, 1.0, -1.0, 1e308]))
_IDS = st.one_of(
    st.binary(max_size=9),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(lambda ids: msgspec_i32(ids)),
    st.lists(st.integers(0, 50), max_size=20).map(lambda ids: msgspec_i32(ids)),
)
_JSON = st.recursive(
    st.none() | st.booleans() | _INTS | _FLOATS | _TEXT | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


def msgspec_i32(ids: list[int]) -> bytes:
    """Ids as they travel."""
    return b"".join(one.to_bytes(4, "little", signed=True) for one in ids)


def _any_of(info: mi.Type) -> st.SearchStrategy[Any]:
    match info:
        case mi.UnionType():
            return st.one_of([_any_of(option) for option in info.types])
        case mi.StructType():
            return st.deferred(lambda: _struct(info))
        case mi.StrType():
            return _TEXT
        case mi.IntType():
            return _INTS
        case mi.FloatType():
            return _FLOATS
        case mi.BoolType():
            return st.booleans()
        case mi.BytesType():
            return _IDS
        case mi.NoneType():
            return st.none()
        case mi.LiteralType():
            return st.sampled_from(info.values)
        case mi.ListType():
            return st.lists(st.deferred(lambda: _any_of(info.item_type)), max_size=3)
        case mi.VarTupleType():
            return st.lists(st.deferred(lambda: _any_of(info.item_type)), max_size=3).map(tuple)
        case mi.TupleType():
            return st.tuples(*[_any_of(item) for item in info.item_types])
        case mi.DictType():
            return st.dictionaries(_any_of(info.key_type), st.deferred(lambda: _any_of(info.value_type)), max_size=3)
        case mi.AnyType():
            return _JSON
    raise AssertionError(f"no strategy for {info}")
