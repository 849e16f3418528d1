"""The wire format, byte for byte, and as a process without msgspec sees it."""

from __future__ import annotations

import inspect
import json
import typing
from typing import Any

import msgpack
import msgspec
import pytest

from common import messages
from common.inboxes import BOUNDS, INBOX_TYPES
from tests.wire.make_golden import PATH
from tests.wire.samples import SAMPLES

GOLDEN: dict[str, str] = json.loads(PATH.read_text())
BY_NAME = {type(sample).__name__: sample for sample in SAMPLES}
MESSAGES = {
    cls.__name__
    for cls in vars(messages).values()
    if inspect.isclass(cls) and issubclass(cls, messages.Message) and cls is not messages.Message
}


def test_every_message_has_a_sample_and_golden_bytes() -> None:
    assert set(BY_NAME) == MESSAGES == set(GOLDEN)


def test_every_message_is_in_some_inbox() -> None:
    members = {cls.__name__ for union in INBOX_TYPES.values() for cls in typing.get_args(union) or (union,)}
    assert members == MESSAGES
    assert set(INBOX_TYPES) == set(BOUNDS)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_bytes_are_the_golden_ones(name: str) -> None:
    assert msgspec.msgpack.encode(BY_NAME[name]).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_golden_bytes_decode_to_the_message(name: str) -> None:
    sample = BY_NAME[name]
    assert msgspec.msgpack.decode(bytes.fromhex(GOLDEN[name]), type=type(sample)) == sample


def plain(value: Any) -> Any:
    """What a reader without msgspec should see of a struct."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        fields = [plain(getattr(value, name)) for name in value.__struct_fields__]
        if config.array_like:
            return fields
        mapped = dict(zip(value.__struct_encode_fields__, fields, strict=True))
        return {config.tag_field: config.tag, **mapped} if config.tag is not None else mapped
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_plain_msgpack_reads_every_field(name: str) -> None:
    """Every field of a sample is away from its default, so none may be missing."""
    found = msgpack.unpackb(bytes.fromhex(GOLDEN[name]), strict_map_key=False)
    assert found["type"] == name
    assert found == plain(BY_NAME[name])


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_what_plain_msgpack_writes_is_read(name: str) -> None:
    sample = BY_NAME[name]
    assert msgspec.msgpack.decode(msgpack.packb(plain(sample)), type=type(sample)) == sample


def test_columns_are_little_endian() -> None:
    assert messages.pack_i32([1, -2]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"
    assert messages.pack_f32([1.0]) == b"\x00\x00\x80\x3f"
    assert messages.unpack_i32(messages.pack_i32([1, -2])).tolist() == [1, -2]
    assert messages.unpack_f32(messages.pack_f32([0.5])).tolist() == [0.5]


def test_defaults_are_left_out() -> None:
    abort = messages.Abort(rid="r", gateway="g")
    assert msgpack.unpackb(msgspec.msgpack.encode(abort)) == {"type": "Abort", "rid": "r", "gateway": "g"}


@pytest.mark.parametrize("name", sorted(MESSAGES))
@pytest.mark.parametrize("cut", [1, 7])
def test_a_truncated_message_is_refused(name: str, cut: int) -> None:
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        msgspec.msgpack.decode(bytes.fromhex(GOLDEN[name])[:-cut], type=type(BY_NAME[name]))


def test_a_message_of_another_inbox_is_refused() -> None:
    decoder = msgspec.msgpack.Decoder(INBOX_TYPES["tokenizer"])
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(bytes.fromhex(GOLDEN["StepResult"]))
