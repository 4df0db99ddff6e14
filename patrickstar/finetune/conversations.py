"""Conversations in files of JSON lines, of which nothing is trained on before all lines were looked at.

A line is one of

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"prompt": "…", "answer": "…"}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from patrickstar.command.flags import UsageError

ROLES = ("system", "user", "assistant")

_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_FORMS = '"messages", "prompt" and "answer", or "conversations"'
_SHOWN_ERRORS = 3


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    """One of ``ROLES``."""
    content: str

    def as_dict(self) -> dict[str, str]:
        """Returns the dict that chat templates take."""
        return {"role": self.role, "content": self.content}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages of which the last is an answer."""

    messages: tuple[Message, ...]
    origin: str
    """File and line, for errors."""

    @property
    def answers(self) -> list[int]:
        """The indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message.role == "assistant"]

    def as_line(self) -> str:
        """Returns one line of a JSONL file."""
        return json.dumps({"messages": [message.as_dict() for message in self.messages]}, ensure_ascii=False)


def question(prompt: str, answer: str, origin: str = "") -> Conversation:
    """A conversation of one question and its answer."""
    return Conversation((Message("user", prompt), Message("assistant", answer)), origin)


def read_conversations(path: Path) -> list[Conversation]:
    """All conversations of a file; messages after the last answer, from which nothing is learned, are left out.

    Raises:
        UsageError: the file cannot be read, a line is broken (with its number), or there is none.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); give a file of JSON lines") from error
    found, errors = [], []
    for number, line in enumerate(lines, start=1):
        origin = f"{path}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                found.append(_conversation(json.loads(text), origin))
        except (ValueError, RecursionError) as error:
            errors.append(f"{origin}: {_in_words(error)}")
    if errors:
        more = f"; and {len(errors) - _SHOWN_ERRORS} lines more" if len(errors) > _SHOWN_ERRORS else ""
        raise UsageError("; ".join(errors[:_SHOWN_ERRORS]) + more)
    if not found:
        raise UsageError(f"{path} has no line; each is a JSON object with {_FORMS}")
    return found


def write_conversations(conversations: Iterable[Conversation], path: Path) -> None:
    """Writes a file that :func:`read_conversations` reads."""
    path.write_text("".join(f"{each.as_line()}\n" for each in conversations), encoding="utf-8")


def _in_words(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"is no JSON ({error.msg} at column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"is no UTF-8 (byte {error.start})"
    return str(error)


def _conversation(said: Any, origin: str) -> Conversation:
    """The conversation of a line's JSON.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(said, dict):
        raise ValueError(f"is a JSON {type(said).__name__}, not an object with {_FORMS}")
    if "messages" in said:
        messages = _messages(said["messages"], "messages", ("role", "content"), {role: role for role in ROLES})
    elif "conversations" in said:
        messages = _messages(said["conversations"], "conversations", ("from", "value"), _SHAREGPT_ROLES)
    elif "prompt" in said and "answer" in said:
        messages = [Message("user", _text(said, "prompt")), Message("assistant", _text(said, "answer"))]
    else:
        raise ValueError(f"has the keys {_listed(said)}, but neither {_FORMS}")
    return Conversation(_up_to_the_last_answer(messages), origin)


def _messages(said: Any, name: str, keys: tuple[str, str], roles: dict[str, str]) -> list[Message]:
    if not isinstance(said, list) or not said:
        raise ValueError(f'"{name}" is {_shown(said)}, not a list of messages')
    result = []
    for index, message in enumerate(said):
        where = f"{name}[{index}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} is {_shown(message)}, not an object")
        role = message.get(keys[0])
        if role not in roles:
            raise ValueError(f'{where} has "{keys[0]}": {_shown(role)}; it must be one of {", ".join(roles)}')
        result.append(Message(roles[role], _text(message, keys[1], f"{where} ")))
    return result


def _text(said: dict, key: str, where: str = "") -> str:
    value = said.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'{where}has "{key}": {_shown(value)}; it must be a text that is not empty')
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f'{where}has half of a surrogate pair in "{key}"; write the whole character')
    return value


def _up_to_the_last_answer(messages: Sequence[Message]) -> tuple[Message, ...]:
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not answers:
        raise ValueError("has no message of the assistant; there is nothing to learn")
    if "user" not in [message.role for message in messages[: answers[0]]]:
        raise ValueError("begins with an answer; a message of the user must come before")
    return tuple(messages[: answers[-1] + 1])


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _listed(said: dict) -> str:
    return ", ".join(f'"{key}"' for key in list(said)[:5]) or "none"
