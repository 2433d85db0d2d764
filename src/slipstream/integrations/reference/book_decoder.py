"""`SpeculativeDecoder(target_model, draft_model, draft_tokens).decode(input_ids, max_new_tokens)`, as book chapters do.

In the books, `max_new_tokens` limits prompt and output together, an end token ends nothing, and tokens are sampled from
the full softmax. Here `max_new_tokens` limits the output alone; the other two are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from slipstream.checks import check_whole, is_whole
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import SlipstreamError, UsageError
from slipstream.integrations.reference.generate_functions import decoder_of, seed_from_torch
from slipstream.sampling.params import SamplingParams
from slipstream.text.results import Stats


class SpeculativeDecoder:
    """Samples from the target at temperature 1, drafting `draft_tokens` tokens per round (0: none).

    target_model, draft_model: loaded Hugging Face causal language models of one vocabulary.
    """

    def __init__(self, target_model: Module, draft_model: Module, draft_tokens: int = 4) -> None:
        check_whole("draft_tokens", draft_tokens, 0, MAX_DRAFT_TOKENS)
        if draft_model is None:
            raise UsageError("draft_model=None; allowed: a loaded Hugging Face causal language model")
        self.target, self.draft, self.draft_tokens = target_model, draft_model, draft_tokens
        self._stats: Stats | None = None
        decoder_of(target_model, draft_model)  # refuses two models that do not fit

    def decode(self, input_ids: Tensor, max_new_tokens: int) -> Tensor:
        """The prompt and `max_new_tokens` tokens after it. input_ids: [1, n] -> [1, n + max_new_tokens].

        UsageError for another shape, an unknown token id, or more tokens than the target's context holds. The seed
        comes from torch's global generator.
        """
        decoder = decoder_of(self.target, self.draft)
        prompt = _prompt(input_ids)
        room = decoder.target.backend.max_length - len(prompt)
        if room < 1:
            raise UsageError(f"input_ids has {len(prompt)} tokens; allowed: at most {len(prompt) + room - 1}")
        if not is_whole(max_new_tokens, 1, room):
            raise UsageError(
                f"max_new_tokens={max_new_tokens!r}; allowed: a whole number from 1 to {room}, the room that the "
                f"model's context leaves after {len(prompt)} tokens"
            )
        params = SamplingParams(
            temperature=1.0,
            max_tokens=max_new_tokens,
            ignore_eos=True,
            num_draft_tokens=self.draft_tokens,
            seed=seed_from_torch(),
        )
        result = decoder.generate(prompt, params)
        self._stats = result.stats
        return torch.cat([input_ids, input_ids.new_tensor([result.token_ids])], dim=1)

    @property
    def stats(self) -> Stats:
        """Statistics of the last `decode`: `tokens_per_second`, `block_efficiency` and so on."""
        if self._stats is None:
            raise SlipstreamError("there are no statistics before the first decode")
        return self._stats

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted in the last `decode`, 0.0 if nothing was drafted."""
        return self.stats.acceptance_rate or 0.0


def _prompt(input_ids: Any) -> list[int]:
    if not isinstance(input_ids, Tensor) or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise UsageError(f"input_ids={input_ids!r:.80}; allowed: a tensor of token ids")
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise UsageError(f"input_ids of shape {tuple(input_ids.shape)}; allowed: (1, n) with n >= 1")
    ids: list[int] = input_ids[0].tolist()
    return ids
