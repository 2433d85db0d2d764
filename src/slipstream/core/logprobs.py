"""Log-probabilities of committed tokens, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.rounds import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """For each token its own log-probability and the `count` highest. logits: [J, V], of which row j chose tokens[j].

    Takes one transfer from the device.
    """
    logprobs = logits[: len(tokens)].float().log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor(tokens, dtype=torch.int64).to(logits.device)[:, None])
    values, ids = logprobs.topk(count, dim=-1)
    table = torch.cat([own.double(), values.double(), ids.double()], dim=1).tolist()  # ids are exact in float64
    return tuple(
        TokenLogprobs(token, line[0], tuple(zip(map(int, line[1 + count :]), line[1 : 1 + count], strict=True)))
        for token, line in zip(tokens, table, strict=True)
    )
