"""Where sequences of tokens come from: random numbers, or a corpus. Sample i is the same whoever asks for it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

END = "<|endoftext|>"
"""Between two texts; token 0."""
MAX_TOKENS = 2**16
"""Ids that a corpus may have: it is kept as uint16."""
_PIECE_CHARACTERS = 2**20


class TokenSource(Protocol):
    """Endless samples."""

    def sample(self, index: int) -> np.ndarray:
        """The tokens (int64) of sample ``index``, 0 or more."""


class RandomTokens:
    """Tokens without meaning, evenly distributed."""

    def __init__(self, num_tokens: int, length: int, seed: int):
        """``length`` of ``num_tokens`` ids in each sample."""
        self._num_tokens = num_tokens
        self._length = length
        self._seed = seed

    def sample(self, index: int) -> np.ndarray:
        """See :class:`TokenSource`."""
        return np.random.default_rng((self._seed, index)).integers(0, self._num_tokens, self._length)


class Corpus:
    """A text's tokens, cut into sequences; all of them in another order in each epoch."""

    def __init__(self, tokens: np.ndarray, num_tokens: int, length: int, seed: int, name: str):
        """``tokens`` is 1-dimensional and may be memory-mapped; what fills no sequence of ``length`` is left out.

        Raises:
            ValueError: it has not one sequence of tokens.
        """
        self._num_sequences = len(tokens) // length
        if self._num_sequences == 0:
            raise ValueError(f"{name} has {len(tokens)} tokens, --length is {length}; lower it or give more data")
        self._tokens = tokens
        self._num_tokens = num_tokens
        self._length = length
        self._seed = seed
        self._name = name
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    def _make_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(self._num_sequences)

    def sample(self, index: int) -> np.ndarray:
        """See :class:`TokenSource`.

        Raises:
            ValueError: a token is none that the model has.
        """
        epoch, within = divmod(index, self._num_sequences)
        start = int(self._order(epoch)[within]) * self._length
        sample = np.asarray(self._tokens[start : start + self._length], dtype=np.int64)
        if sample.max() >= self._num_tokens:
            raise ValueError(
                f"{self._name} has token {sample.max()}, the model's data tokens are 0 to {self._num_tokens - 1}; give "
                "the --vocab that the tokens were made with (with --model bert one more, for the mask)"
            )
        return sample


def map_tokens(path: Path) -> np.ndarray:
    """The token ids of a ``.bin`` file (little-endian uint16), memory-mapped.

    Raises:
        ValueError: its size is that of no such file.
    """
    num_bytes = path.stat().st_size
    if num_bytes == 0 or num_bytes % 2:
        raise ValueError(f"{path} has {num_bytes} bytes; a .bin file holds token ids as uint16, two bytes each")
    return np.memmap(path, dtype="<u2", mode="r")


def text_files(path: Path) -> list[Path]:
    """``path`` itself, or all ``*.txt`` below it in order of their names.

    Raises:
        ValueError: there is none.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    if not files:
        raise ValueError(f"--data {path} is no file and has no *.txt below it; give a text, a folder of them or a .bin")
    return files


def make_byte_tokens(files: list[Path]) -> np.ndarray:
    """Each byte b of the files is token b + 1; token 0 ends a file."""
    parts = []
    for path in files:
        parts += [np.frombuffer(path.read_bytes(), dtype=np.uint8).astype("<u2") + 1, np.zeros(1, dtype="<u2")]
    return np.concatenate(parts)


def train_bpe(files: list[Path], num_tokens: int) -> tuple[np.ndarray, str]:
    """A byte-level BPE with up to ``num_tokens`` ids is trained on the files; their tokens, and the tokenizer as JSON.

    Raises:
        ValueError: the tokenizers library is not installed, or there are too few ids.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError(
            f"--tokenizer bpe needs the library tokenizers ({error}); or give --tokenizer bytes"
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((piece for path in files for piece in _pieces(path)), trainer)
    parts = []
    for path in files:
        parts += [np.array(encoded.ids, dtype="<u2") for encoded in tokenizer.encode_batch(list(_pieces(path)))]
        parts.append(np.zeros(1, dtype="<u2"))
    return np.concatenate(parts), tokenizer.to_str()


def least_tokens(tokenizer: str) -> int:
    """Ids that ``--tokenizer`` needs at least: all bytes and the end of a text."""
    return 257 if tokenizer in ("bpe", "bytes") else 1


def _pieces(path: Path) -> Iterator[str]:
    """The text in pieces of about a million characters, each of whole lines."""
    piece: list[str] = []
    num_characters = 0
    with path.open(encoding="utf-8", newline="") as lines:
        for line in lines:
            piece.append(line)
            num_characters += len(line)
            if num_characters >= _PIECE_CHARACTERS:
                yield "".join(piece)
                piece, num_characters = [], 0
    if piece:
        yield "".join(piece)
