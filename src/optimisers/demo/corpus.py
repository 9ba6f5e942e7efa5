"""The text: the language reference that ships inside CPython, as numbers, in three parts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

__all__ = ["Corpus", "Ids", "entropy", "read"]

Ids = NDArray[np.intp]
"""Characters as their numbers in the alphabet."""

_FIRST, _SECOND = 0.6, 0.9
"""Where the first and the second part end. What is left is held out."""


@dataclass(frozen=True)
class Corpus:
    """A text in three parts, which no training batch crosses."""

    alphabet: str
    first: Ids
    second: Ids
    held_out: Ids

    def encode(self, text: str) -> Ids:
        """The numbers of characters."""
        return np.array([self.alphabet.index(character) for character in text], np.intp)

    def decode(self, ids: Iterable[int]) -> str:
        """The characters of numbers."""
        return "".join(self.alphabet[at] for at in ids)


def read(texts: Mapping[str, str] = topics) -> Corpus:
    """The language reference, each paragraph once.

    Its topics repeat one another in long stretches; held-out text that was also trained on would prove nothing.

    >>> corpus = read({"a": "one\\n\\ntwo", "b": "two\\n\\nthree"})
    >>> corpus.decode(corpus.first) + corpus.decode(corpus.second) + corpus.decode(corpus.held_out)
    'one\\n\\ntwo\\n\\nthree'
    """
    paragraphs: dict[str, str] = {}
    for _, text in sorted(texts.items()):
        for paragraph in text.split("\n\n"):
            # The same paragraph stands at several indents, broken into other lines.
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    whole = "\n\n".join(paragraphs.values())
    alphabet = "".join(sorted(set(whole)))
    number = {character: at for at, character in enumerate(alphabet)}
    ids = np.array([number[character] for character in whole], np.intp)
    first, second = round(len(ids) * _FIRST), round(len(ids) * _SECOND)
    return Corpus(alphabet, ids[:first], ids[first:second], ids[second:])


def entropy(ids: Ids) -> float:
    """The entropy of single characters, in nats: the least loss that a model without context can reach on a text.

    >>> round(entropy(np.array([0, 1, 0, 1])), 4)
    0.6931
    """
    counts = np.bincount(ids)
    shares = counts[counts > 0] / len(ids)
    return float(-np.sum(shares * np.log(shares)))
