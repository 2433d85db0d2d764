"""Grammars compiled for one model's vocabulary by llguidance, and a row's way through one.

A mask is a function of the grammar and the tokens alone, and allows a single token wherever the grammar forces one:
llguidance picks the tokens into which its tokenizer would cut the forced text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.constraints.constraint import Constraint
from slipstream.constraints.grammar_text import load_llguidance, one_line
from slipstream.errors import UsageError
from slipstream.models.byte_vocabulary import ByteVocabulary, NamedModel, byte_vocabulary

SAVED = 64  # grammars that stay compiled


class _Vocabulary:
    """The tokens as llguidance asks for them."""

    bos_token_id = None

    def __init__(self, known: ByteVocabulary) -> None:
        names = {number: name for name, number in known.special.items()}
        self.tokens = [text or names.get(number, "").encode() for number, text in enumerate(known.texts)]
        self.special_token_ids = sorted(names)
        self.eos_token_id = known.end_ids[0]
        self._known = known

    def __call__(self, text: bytes | str) -> list[int]:
        return self._known.encode(text if isinstance(text, str) else text.decode()).ids


@dataclass
class CompiledGrammars:
    """The grammars of one model. Its vocabulary is handed to llguidance when the first constraint asks for it.

    That takes a second for 150,000 tokens; a grammar takes milliseconds, and the last `SAVED` stay compiled. Threads
    that compile at once take turns.
    """

    model: NamedModel
    vocab_size: int
    _saved: OrderedDict[str, Any] = field(default_factory=OrderedDict, repr=False)
    _turn: Lock = field(default_factory=Lock, repr=False, compare=False)

    def constraint(self, wanted: Constraint, end_ids: frozenset[int]) -> GrammarState:
        """A row's own way through a grammar. end_ids: the tokens that end the row."""
        with self._turn:
            compiled = self._compiled(wanted)
            return GrammarState(compiled, self.vocab_size, self._end_ids, end_ids)

    def _compiled(self, wanted: Constraint) -> Any:
        """A grammar, compiled; UsageError if not even its first token can be told within llguidance's limits."""
        if wanted.text in self._saved:
            self._saved.move_to_end(wanted.text)
            return self._saved[wanted.text]
        matcher = load_llguidance().LLMatcher(self._tokenizer, wanted.text, log_level=0)
        trial = matcher.deep_copy()
        if not trial.is_error():
            trial.compute_bitmask()
        if trial.is_error():
            raise UsageError(f"constraint: {one_line(trial.get_error())}; allowed: a smaller or simpler one")
        self._saved[wanted.text] = matcher
        while len(self._saved) > SAVED:
            self._saved.popitem(last=False)
        return matcher

    @property
    def _end_ids(self) -> tuple[int, ...]:
        return tuple(number for number in self.model.end_ids if number < self.vocab_size)

    @cached_property
    def _tokenizer(self) -> Any:
        if not self._end_ids:
            raise UsageError(
                f"constraint: model {self.model.name!r} has no end token, so that a text could not end with the "
                "grammar; allowed: models that have one"
            )
        library = load_llguidance()
        try:
            wrapper = library.TokenizerWrapper(_Vocabulary(byte_vocabulary(self.model, self.vocab_size)))
        except UsageError as error:
            raise UsageError(
                f"constraint: model {self.model.name!r}: {error}; allowed: models whose tokens can be read as bytes"
            ) from None
        return library.LLTokenizer(wrapper, n_vocab=self.vocab_size, eos_token=list(self._end_ids))


class GrammarState:
    """One row's way through a grammar; see `RowConstraint`. It remembers where it stands, which no answer depends on.

    model_ends: the model's end tokens; row_ends: all that end this row, further ones being allowed where those are.
    """

    def __init__(self, compiled: Any, vocab_size: int, model_ends: Sequence[int], row_ends: frozenset[int]) -> None:
        self._compiled, self._matcher, self._consumed = compiled, compiled.deep_copy(), list[int]()
        self._words = -(-vocab_size // 32)
        self._end, self._model_ends, self._ends = model_ends[0], frozenset(model_ends), row_ends
        self._over = False  # an end follows what was consumed
        self._further = np.array(sorted(row_ends.difference(model_ends)), dtype=np.int64)

    def masks(self, output: Sequence[int], draft: Sequence[int]) -> NDArray[np.uint8]:
        """See `RowConstraint.masks`; all masks of the draft are computed in one call."""
        reached = self._reach(output)
        if self._over or reached < len(output):
            return np.full((1 + len(draft), 4 * self._words), 255 if self._over else 0, dtype=np.uint8)
        found, size = np.full((1 + len(draft), self._words), -1, dtype=np.int32), 4 * self._words
        if draft:
            question = [(self._matcher, 0, list(draft))]
            _executor().unsafe_compute_mask_ptr_with_draft_token(question, found.ctypes.data, size, len(found))
        else:
            self._matcher.unsafe_compute_mask_ptr(found.ctypes.data, size)
        masks = found.view(np.uint8)
        if self._matcher.is_error():  # a limit was exceeded, maybe by a token that the target will not choose
            masks = np.concatenate([self._alone([*output, *draft[:count]]) for count in range(1 + len(draft))])
        if len(self._further):
            ends = (masks[:, self._end // 8] >> (self._end % 8)) & 1
            at = ends.nonzero()[0][:, None]
            np.bitwise_or.at(masks, (at, self._further // 8), (1 << (self._further % 8)).astype(np.uint8))
        return masks

    def num_legal(self, output: Sequence[int], draft: Sequence[int]) -> int:
        """See `RowConstraint.num_legal`."""
        return max(0, self._reach([*output, *draft]) - len(output))

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        """See `RowConstraint.forced`; a row with several end tokens is not forced to take one of them."""
        found = list[int]()
        while len(found) < limit and self._reach([*output, *found]) == len(output) + len(found) and not self._over:
            if self._matcher.is_stopped():
                found += [self._end] if len(self._ends) == 1 and self._matcher.is_accepting() else []
                break
            run = self._matcher.compute_ff_tokens()
            if not run:
                break
            found += run
        return found[:limit]

    def problem(self, output: Sequence[int]) -> str | None:
        """See `RowConstraint.problem`."""
        legal = self._reach(output)
        if self._over:
            return None
        if legal < len(output) and not self._matcher.is_error():
            return f"token {output[legal]} of the text is not one that the constraint allows"
        if not self._matcher.is_error():
            return None
        return f"the constraint exceeds a limit of llguidance: {one_line(self._matcher.get_error())}"

    def _reach(self, tokens: Sequence[int]) -> int:
        """Stand behind these tokens, or those before an end or before the first that is not allowed.

        Returns how many tokens are allowed, the end included; the matcher itself is never told of it.
        """
        if self._matcher.is_error():
            self._matcher, self._consumed = self._compiled.deep_copy(), []
        same = _common(self._consumed, tokens)
        if same < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - same)
        end = next((at for at in range(same, len(tokens)) if tokens[at] in self._model_ends), len(tokens))
        taken = self._matcher.try_consume_tokens(list(tokens[same:end])) if same < end else 0
        reached = same + taken
        self._consumed = list(tokens[:reached])
        self._over = reached < len(tokens) and tokens[reached] in self._ends and bool(self._matcher.is_accepting())
        return reached + self._over

    def _alone(self, tokens: Sequence[int]) -> NDArray[np.uint8]:
        """The mask behind these tokens from a fresh start; nothing where a limit is exceeded on the way."""
        fresh = self._compiled.deep_copy()
        reached = fresh.try_consume_tokens(list(tokens)) == len(tokens)
        bits = np.frombuffer(fresh.compute_bitmask(), dtype=np.uint8)[None] if not fresh.is_error() else None
        if bits is None or fresh.is_error():
            return np.zeros((1, 4 * self._words), dtype=np.uint8)
        return bits.copy() if reached else np.full((1, 4 * self._words), 255, dtype=np.uint8)


@cache
def _executor() -> Any:
    """What computes the masks of a draft; one thread, as forwards use the others."""
    return load_llguidance().LLExecutor(1)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(at for at in range(shorter) if one[at] != other[at])
