"""Conversations as rows of tokens: the chat template, which tokens are answers, packing.

A row's labels are the tokens of the answers, with what ends an answer, and IGNORED elsewhere. Packed rows hold several
conversations one after the other; ``position_ids`` begin anew with each, from which transformers' masks keep attention
within a conversation (``transformers.masking_utils.find_packed_sequence_indices``). They have no ``attention_mask``:
with one, transformers looks at no positions.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jinja2 import TemplateError

from patrickstar.command.flags import UsageError
from patrickstar.finetune.batches import Batch
from patrickstar.finetune.conversations import Conversation
from patrickstar.sequence.sharded_labels import IGNORED

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' + (message['role'] | capitalize) + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)
"""For tokenizers that have none: only words, so that no token is new to the model."""

_DTYPE = torch.int32  # half of what models take: all rows are in memory
_ROW_MULTIPLE = 32
"""Rows of a batch are cut to a multiple of this, so that there are few different lengths."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One row's tokens, and which of them are answers."""

    input_ids: list[int]
    labels: list[int]
    """One per entry of ``input_ids``."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_answer_tokens(self) -> int:
        """Labels that count."""
        return sum(label != IGNORED for label in self.labels)


@dataclasses.dataclass(kw_only=True)
class Encoded:
    """Encoded conversations, and how many lost tokens."""

    examples: list[Tokens] = dataclasses.field(default_factory=list)
    num_cut: int = 0
    """Examples that were longer than a row and lost their end."""
    num_dropped: int = 0
    """Examples of whose answers nothing was left."""

    def remarks(self, name: str, seq_len: int) -> list[str]:
        """Returns warnings about examples that were cut or dropped."""
        found = []
        if self.num_cut:
            found.append(
                f"{name}: {self.num_cut} of {len(self.examples)} examples are cut to --seq-len {seq_len} tokens"
            )
        if self.num_dropped:
            found.append(f"{name}: {self.num_dropped} left out, whose answers begin after --seq-len {seq_len} tokens")
        return found


class ChatEncoder:
    """Makes tokens of conversations with one tokenizer's chat template.

    Args:
        tokenizer: of transformers; one without a chat template gets ``DEFAULT_TEMPLATE``, which is saved with it.

    Raises:
        UsageError: the tokenizer does not tell where in the text a token is.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.uses_default_template = tokenizer.chat_template is None
        if not tokenizer.is_fast:
            raise UsageError(
                f"{type(tokenizer).__name__} does not tell where its tokens are in a text; give a folder with "
                "tokenizer.json"
            )
        if self.uses_default_template:
            first = tokenizer("a").input_ids[:1]
            begins = "{{ bos_token }}" if first == [tokenizer.bos_token_id] else ""
            ends = DEFAULT_TEMPLATE if tokenizer.eos_token else DEFAULT_TEMPLATE.replace("{{ eos_token }}", "")
            tokenizer.chat_template = begins + ends

    def prompt(self, conversation: Conversation) -> list[int]:
        """The tokens after which the model gives the conversation's last answer."""
        return self._ids(self._render(conversation, len(conversation.messages) - 1, asks=True))

    def end_ids(self, conversation: Conversation) -> list[int]:
        """The tokens that end an answer: the tokenizer's own, and the one that the template writes."""
        last = [label for label in self.tokens(conversation)[-1].labels if label != IGNORED][-1:]
        ends = [token for token in last if token in self.tokenizer.all_special_ids]
        own = self.tokenizer.eos_token_id
        return sorted({*ends, *([] if own is None else [own])})

    def encode(self, conversations: Iterable[Conversation], seq_len: int) -> Encoded:
        """Examples of at most ``seq_len`` tokens.

        Raises:
            UsageError: the chat template refuses a conversation, or does not show where its answers begin.
        """
        result = Encoded()
        for conversation in conversations:
            for tokens in self.tokens(conversation):
                if len(tokens) > seq_len:
                    tokens = Tokens(tokens.input_ids[:seq_len], tokens.labels[:seq_len])
                    if tokens.num_answer_tokens == 0:
                        result.num_dropped += 1
                        continue
                    result.num_cut += 1
                result.examples.append(tokens)
        return result

    def tokens(self, conversation: Conversation) -> list[Tokens]:
        """The whole conversation as one example. Where a template writes earlier answers otherwise than the last one
        (without its thoughts), each answer is one with what comes before it: as the model will see it.
        """
        whole = self._render(conversation, len(conversation.messages))
        spans = [self._span(conversation, index, whole) for index in conversation.answers]
        if None not in spans:
            return [self._tokens(whole, spans)]
        result = []
        for index in conversation.answers:
            text = self._render(conversation, index + 1)
            span = self._span(conversation, index, text)
            if span is None:
                raise UsageError(
                    f"{conversation.origin}: the tokenizer's chat template writes the prompt of messages[{index}] "
                    "otherwise when its answer is there, so it does not show where the answer begins; give another "
                    "template in the tokenizer's chat_template"
                )
            result.append(self._tokens(text, [span]))
        return result

    def _span(self, conversation: Conversation, index: int, text: str) -> tuple[int, int] | None:
        """From where to where in ``text`` answer ``index`` is, with what ends it but for white space."""
        before, with_it = self._render(conversation, index, asks=True), self._render(conversation, index + 1)
        if not (with_it.startswith(before) and text.startswith(with_it)):
            return None
        return len(before), len(with_it.rstrip())

    def _render(self, conversation: Conversation, num_messages: int, asks: bool = False) -> str:
        messages = [message.as_dict() for message in conversation.messages[:num_messages]]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        except (TemplateError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{conversation.origin}: the tokenizer's chat template refuses it: {error}") from error

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def _tokens(self, text: str, spans: Sequence[tuple[int, int]]) -> Tokens:
        """A token is of an answer if any of its characters are."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, starts, ends = encoded.input_ids, *zip(*encoded.offset_mapping, strict=True)
        labels = [IGNORED] * len(ids)
        for begin, end in spans:
            first = bisect.bisect_right(ends, begin)
            last = bisect.bisect_left(starts, end)
            labels[first:last] = ids[first:last]
        labels[0] = IGNORED  # nothing comes before it
        return Tokens(ids, labels)


def padded_rows(examples: Sequence[Tokens], pad_id: int) -> Batch:
    """A row for each example, all as long as the longest, with an ``attention_mask``."""
    shape = len(examples), max(map(len, examples))
    rows = {"input_ids": torch.full(shape, pad_id, dtype=_DTYPE), "labels": torch.full(shape, IGNORED, dtype=_DTYPE)}
    rows["attention_mask"] = torch.zeros(shape, dtype=torch.int8)
    for row, tokens in enumerate(examples):
        rows["input_ids"][row, : len(tokens)] = torch.tensor(tokens.input_ids)
        rows["labels"][row, : len(tokens)] = torch.tensor(tokens.labels)
        rows["attention_mask"][row, : len(tokens)] = 1
    return rows


def packed_rows(examples: Sequence[Tokens], seq_len: int, pad_id: int) -> Batch:
    """Several examples per row of ``seq_len`` tokens, each whole, with ``position_ids``; padding is one more."""
    bins = _packed(examples, seq_len)
    shape = len(bins), seq_len
    rows = {"input_ids": torch.full(shape, pad_id, dtype=_DTYPE), "labels": torch.full(shape, IGNORED, dtype=_DTYPE)}
    rows["position_ids"] = torch.zeros(shape, dtype=_DTYPE)
    for row, packed in enumerate(bins):
        begin = 0
        for tokens in packed:
            part = row, slice(begin, begin + len(tokens))
            rows["input_ids"][part] = torch.tensor(tokens.input_ids)
            rows["labels"][part] = torch.tensor([IGNORED, *tokens.labels[1:]])
            rows["position_ids"][part] = torch.arange(len(tokens))
            begin += len(tokens)
        rows["position_ids"][row, begin:] = torch.arange(seq_len - begin)
    return rows


def _packed(examples: Sequence[Tokens], seq_len: int) -> list[list[Tokens]]:
    """The longest first, each into the fullest row that has room for it."""
    rows: list[list[Tokens]] = []
    room: list[tuple[int, int]] = []  # of each row, sorted
    for tokens in sorted(examples, key=len, reverse=True):
        at = bisect.bisect_left(room, (len(tokens), -1))
        if at == len(room):
            rows.append([])
            left, row = seq_len, len(rows) - 1
        else:
            left, row = room.pop(at)
        rows[row].append(tokens)
        bisect.insort(room, (left - len(tokens), row))
    return rows


def model_inputs(batch: Batch) -> Batch:
    """Converts rows to int64 and drops columns in which no row has a token."""
    width = batch["input_ids"].shape[1]
    if "attention_mask" in batch:
        longest = int(batch["attention_mask"].sum(1).max())
        width = min(-(-longest // _ROW_MULTIPLE) * _ROW_MULTIPLE, width)
    return {name: values[:, :width].long() for name, values in batch.items()}
