"""What a gateway has not been sent yet of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.messages import Finish, TextRow, TokenLogprob


@dataclass(slots=True)
class PendingRow:
    """A ``TextRow`` in the making: everything since the last one that the gateway's channel took.

    It is the request's cursor: while the channel is full it grows (by no more than the request
    generates meanwhile), and the next send carries it all.
    """

    rid: str
    attempt: int
    index: int
    text_offset: int
    ids: bytearray = field(default_factory=bytearray)
    texts: list[str] = field(default_factory=list)
    accepted: tuple[int, int] | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    starts: bytearray = field(default_factory=bytearray)

    @classmethod
    def from_wire(cls, row: TextRow) -> PendingRow:
        """A row that was made ready to be sent and could not be: it goes on growing."""
        return cls(
            row.rid,
            row.attempt,
            row.index,
            row.text_offset,
            bytearray(row.ids),
            [row.text] if row.text else [],
            row.accepted,
            list(row.logprobs),
            list(row.prompt_logprobs),
            row.finish,
            bytearray(row.starts),
        )

    @property
    def empty(self) -> bool:
        """There is nothing in it worth a message."""
        return not (self.ids or self.texts or self.accepted or self.prompt_logprobs or self.finish)

    def to_wire(self) -> TextRow:
        """The row as it is sent."""
        return TextRow(
            rid=self.rid,
            attempt=self.attempt,
            index=self.index,
            ids=bytes(self.ids),
            text_offset=self.text_offset,
            text="".join(self.texts),
            accepted=self.accepted,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            finish=self.finish,
            completion_tokens=self.index + len(self.ids) // 4,
            starts=bytes(self.starts),
        )
