"""One request's text: decoding, stop strings, and what of it may be sent when.

Text may be sent when no later id can change it (characters that span tokens) and when it cannot be the
beginning of a stop string. An id is sent once its text is. So what a gateway has of ids and of text always
fits together, and a stop string that is found later was never shown.
"""

from __future__ import annotations

import struct

from common.messages import (
    BeginOutput,
    ErrorInfo,
    Finish,
    StopHit,
    TextRow,
    TokenLogprob,
    TokenRow,
    TopLogprobs,
    pack_ints,
    unpack_f32,
    unpack_i32,
    unpack_ints,
)
from detokenizer_proc.decoding import IncrementalDecoder, Vocabulary
from detokenizer_proc.rows import PendingRow
from detokenizer_proc.stops import StopMatch, StopMatcher

_ONE_ID = struct.Struct("<i")


class Stream:
    """A live request of the detokenizer, from its ``BeginOutput`` to its ending."""

    __slots__ = (
        "_decoder", "_entries", "_held", "_ids", "_is_plain", "_known_len", "_matcher", "_needs", "_sent_ids",
        "_sent_len", "_starts", "_vocabulary", "_with_starts", "begin", "ended", "num_ids",
    )  # fmt: skip

    def __init__(self, begin: BeginOutput, vocabulary: Vocabulary) -> None:
        self.begin = begin
        self.num_ids = 0
        """Output ids taken in."""
        self.ended = False
        self._vocabulary = vocabulary
        self._decoder: IncrementalDecoder = vocabulary.decoder(begin.text.skip_special_tokens)
        stops = tuple(stop for stop in begin.text.stop if stop)
        self._matcher = StopMatcher(stops) if stops else None
        self._held = ""
        """Certain text that may be the beginning of a stop string."""
        self._known_len = 0
        """Characters of certain text, held ones included."""
        self._sent_len = 0
        self._sent_ids = 0
        self._ids: list[int] = []
        """Ids whose text is not sent, ..."""
        self._entries: list[TokenLogprob] = []
        """... their log-probabilities where asked for, ..."""
        self._needs: list[int] = []
        """... and how much text must be sent before each is; fewer than ids while the decoder holds text."""
        self._starts: list[int] = []
        """Where in the text each of them begins, where asked for."""
        self._with_starts = begin.text.starts
        self._is_plain = not stops and begin.logprobs is None and not begin.prompt_ids
        """Text and ids are all that is asked for, and nothing of the text is held back for a stop string."""

    def new_row(self) -> PendingRow:
        """An empty row that continues behind what was put into rows so far."""
        return PendingRow(self.begin.rid, self.begin.attempt, self._sent_ids, self._sent_len)

    def advance_plain(self, row: TokenRow, ready: dict[str, PendingRow | TextRow]) -> bool:
        """``advance`` for nearly every row there is, in a tenth of the steps: nothing is held back, and nothing but new
        ids is said. What can be sent of it is put into ``ready``; False, and nothing is changed, for any other row."""
        if not self._is_plain or self._ids or row.index != self.num_ids or row.finish is not None or not row.ids:
            return False
        decoder, index, offset = self._decoder, self._sent_ids, self._sent_len
        ids, text, num_whole = row.ids, "", 0
        starts: list[int] = []
        for number, (token_id,) in enumerate(_ONE_ID.iter_unpack(ids), start=1):
            if self._with_starts:
                starts.append(offset + len(text) + decoder.held_len)
            text += decoder.push(token_id)
            if not decoder.holding:
                num_whole = number
        self.num_ids += len(ids) // 4
        self._known_len = self._sent_len = offset + len(text)
        self._sent_ids = index + num_whole
        if 4 * num_whole < len(ids):  # the text may be that of ids before; these are to wait
            self._ids += unpack_ints(ids[4 * num_whole :])
            self._starts += starts[num_whole:]
            ids, starts = ids[: 4 * num_whole], starts[:num_whole]
        if text or ids:
            ready[row.rid] = TextRow(
                row.rid, row.attempt, index, ids, offset, text, completion_tokens=index + num_whole,
                starts=pack_ints(starts) if starts else b"",
            )  # fmt: skip
        return True

    def advance(self, row: TokenRow, out: PendingRow) -> StopHit | None:
        """Take in new ids and put what may be sent into ``out``; sets ``ended`` with the ending.

        Ids that are known already are skipped. Returns the stop string that ended the request, if the
        scheduler does not know of its end yet.
        """
        if row.prompt_logprobs or self._is_first_of_one_token_prompt(row):
            out.prompt_logprobs = self._prompt_logprobs(row)
        skip = self.num_ids - row.index
        if skip < 0:
            self._end(out, _lost_ids(row.index, self.num_ids))
            return StopHit(rid=row.rid, attempt=row.attempt, index=self.num_ids, stop="")
        ids = unpack_ints(row.ids)
        if self.begin.logprobs is not None:
            self._entries.extend(self._render(ids, row)[skip:])
        silent = self._silent_last(ids, row.finish)
        for at in range(skip, len(ids)):
            if self._with_starts:
                self._starts.append(self._known_len + self._decoder.held_len)
            text = "" if silent and at == len(ids) - 1 else self._decoder.push(ids[at])
            match = self._take(ids[at], text, out)
            if match is not None:
                self._end(out, Finish("stop", match.stop), drop_held=True)
                known = row.finish is not None and at == len(ids) - 1
                return (
                    None
                    if known
                    else StopHit(rid=row.rid, attempt=row.attempt, index=self.num_ids - 1, stop=match.stop)
                )
        if row.finish is not None:
            self._finish(row.finish, out)
        elif self._ids:
            self._release(out)
        return None

    def _silent_last(self, ids: tuple[int, ...], finish: Finish | None) -> bool:
        """The last id is the stop id that ended the request, which is no part of the text."""
        return (
            finish is not None
            and bool(ids)
            and isinstance(finish.matched, int)
            and ids[-1] == finish.matched
            and not self.begin.text.include_stop_str_in_output
        )

    def _take(self, token_id: int, text: str, out: PendingRow) -> StopMatch | None:
        """Account for one id and its text; a stop string's text is settled here."""
        self.num_ids += 1
        self._ids.append(token_id)
        self._known_len += len(text)
        if not self._decoder.holding:
            self._needs.extend([self._known_len] * (len(self._ids) - len(self._needs)))
        if self._matcher is None:
            if text:
                out.texts.append(text)
                self._sent_len += len(text)
            return None
        match = self._matcher.feed(text) if text else None
        if match is None and self._decoder.holding and (more := self._decoder.pending()):
            # What the decoder holds is whole as it stands, and with it the stop string may be, too.
            match = self._matcher.peek(more)
            if match is not None:
                match = StopMatch(match.stop, len(text) + match.end)
                text += more
        self._hold(text, match, out)
        return match

    def _hold(self, text: str, match: StopMatch | None, out: PendingRow) -> None:
        """Send held and new text but for what may begin a stop string, or belongs to the complete one."""
        assert self._matcher is not None
        whole = self._held + text
        if match is None:
            keep = len(whole) - self._matcher.held
        else:
            keep = len(self._held) + match.end
            if not self.begin.text.include_stop_str_in_output:
                keep -= len(match.stop)
        if keep > 0:
            out.texts.append(whole[:keep])
            self._sent_len += keep
        self._held = whole[keep:]

    def _release(self, out: PendingRow) -> None:
        """Send the ids whose text is sent."""
        needs, sent_len = self._needs, self._sent_len
        ready = len(needs)
        while ready and needs[ready - 1] > sent_len:
            ready -= 1
        if ready:
            self._send_ids(ready, out)

    def _send_ids(self, count: int, out: PendingRow) -> None:
        out.ids += struct.pack(f"<{count}i", *self._ids[:count])
        del self._ids[:count], self._needs[:count]
        if self._with_starts:
            out.starts += struct.pack(f"<{count}i", *self._starts[:count])
            del self._starts[:count]
        self._sent_ids += count
        if self.begin.logprobs is not None:
            out.logprobs.extend(self._entries[:count])
            del self._entries[:count]

    def _finish(self, finish: Finish, out: PendingRow) -> None:
        """The scheduler's ending: flush what is held back, which may yet complete a stop string."""
        text = self._decoder.flush()
        match = None
        if self._matcher is not None:
            match = self._matcher.feed(text)
            self._hold(text, match, out)
        elif text:
            out.texts.append(text)
        if match is not None:
            finish = Finish("stop", match.stop)
        self._end(out, finish, drop_held=match is not None)

    def _end(self, out: PendingRow, finish: Finish, drop_held: bool = False) -> None:
        if self._held and not drop_held:
            out.texts.append(self._held)
        self._held = ""
        self._send_ids(len(self._ids), out)
        out.finish = finish
        self.ended = True

    # ----------------------------------------------------------------- log-probabilities

    def _render(self, ids: tuple[int, ...], row: TokenRow) -> list[TokenLogprob]:
        values = unpack_f32(row.logprobs).tolist()
        return [
            self._entry(token_id, values[n], row.top_logprobs[n] if n < len(row.top_logprobs) else None)
            for n, token_id in enumerate(ids)
        ]

    def _entry(self, token_id: int, logprob: float | None, top: TopLogprobs | None) -> TokenLogprob:
        show = self._vocabulary.show
        likely = []
        if top is not None:
            for other, value in zip(unpack_i32(top.ids).tolist(), unpack_f32(top.logprobs).tolist(), strict=True):
                likely.append((*show(other), value))
        return TokenLogprob(*show(token_id), logprob, likely, token_id, b"" if top is None else top.ids)

    def _is_first_of_one_token_prompt(self, row: TokenRow) -> bool:
        """The scheduler has no values to send then, but the prompt's only token is to be shown all the same."""
        return len(self.begin.prompt_ids) == 4 and row.index == 0 and self.num_ids == 0

    def _prompt_logprobs(self, row: TokenRow) -> list[TokenLogprob]:
        """One entry per prompt token; the first has no distribution before it."""
        ids = unpack_i32(self.begin.prompt_ids).tolist()
        values = unpack_f32(row.prompt_logprobs).tolist()
        tops = row.prompt_top_logprobs
        entries = [
            self._entry(token_id, value, tops[n] if n < len(tops) else None)
            for n, (token_id, value) in enumerate(zip(ids[1:], values, strict=False))
        ]
        return [self._entry(ids[0], None, None), *entries]


def _lost_ids(index: int, known: int) -> Finish:
    """Ids are missing: an error of ours, which ends this request and no other."""
    words = f"output ids {known} to {index - 1} never reached the detokenizer"
    return Finish("error", None, ErrorInfo(status=500, message=words, code="internal_error"))
