"""Stand-ins for channels and gateways in the tests of the tokenizer and detokenizer processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.messages import Message, TextBatch, TextRow, TokenLogprob, unpack_i32


class FakeSender:
    """A channel with room for ``room`` messages (None: any number)."""

    def __init__(self, room: int | None = None) -> None:
        self.sent: list[Message] = []
        self.room = room
        self.closed = False

    def send(self, message: Message) -> bool:
        if self.room is not None and self.room <= 0:
            return False
        if self.room is not None:
            self.room -= 1
        self.sent.append(message)
        return True

    def close(self) -> None:
        self.closed = True


@dataclass
class Channels:
    """Opens a ``FakeSender`` per gateway and remembers it."""

    opened: dict[str, FakeSender] = field(default_factory=dict)
    addresses: list[tuple[str, str]] = field(default_factory=list)

    def connect(self, gateway: str, address: str) -> FakeSender:
        self.addresses.append((gateway, address))
        return self.opened.setdefault(gateway, FakeSender())

    @staticmethod
    def local(gateway: str) -> str:
        return f"ipc://run/{gateway}"


@dataclass
class Reader:
    """What a gateway makes of the rows of one request: everything must join without a gap."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    rows: list[TextRow] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return any(row.finish for row in self.rows)

    def take(self, row: TextRow) -> None:
        assert not self.ended, "a row after the ending"
        assert row.text_offset == len(self.text)
        assert row.index == len(self.ids)
        self.text += row.text
        self.ids += unpack_i32(row.ids).tolist()
        self.logprobs += row.logprobs
        assert row.completion_tokens == len(self.ids)
        self.rows.append(row)


def rows_of(sender: FakeSender) -> list[TextRow]:
    """The rows of every TextBatch sent, in order."""
    return [row for message in sender.sent if isinstance(message, TextBatch) for row in message.rows]


def read(sender: FakeSender, rid: str = "r") -> Reader:
    """Everything one request's gateway was sent."""
    reader = Reader()
    for row in rows_of(sender):
        if row.rid == rid:
            reader.take(row)
    return reader
