"""What `gpu.py` compares beside speed: logits of captured forwards, and which widths give the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from gpu_arms import Setting

from slipstream.reproducibility.calibration import calibrate

FAINT = 2.0**-10  # a factor of embeddings that lets random layers outweigh the last token


def agreeing_widths(backend: Any) -> str:
    """The widths that calibration finds for up to eight rows, and what keeping to them costs a plain step.

    It writes over what is cached.
    """
    found = calibrate(backend, 8)
    return f"{', '.join(map(str, found.widths))} ({found.cost:+.0%})" if found.agrees else "none"


def _shapes() -> Iterator[tuple[int, int]]:
    """Rows and widths whose logits are compared."""
    yield from ((rows, width) for rows in (1, 2, 3, 8) for width in (1, 5, 8, 12))


def compare_logits(setting: Setting, backends: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Graphed and fused against eager after the same ragged random contexts.

    of_other_contexts: the difference that another row's prompt makes, which a mistake in the KV cache would resemble.
    """
    embeddings = [model.get_input_embeddings().weight for model in (setting.target, setting.faster_target)]
    with torch.no_grad():
        for embedding in embeddings:
            embedding.mul_(FAINT)
        try:
            kinds = [kind for kind in backends if kind != "eager"]
            return {kind: _compare(setting, (backends["eager"][0], backends[kind][0])) for kind in kinds}
        finally:
            for embedding in embeddings:
                embedding.div_(FAINT)


def _compare(setting: Setting, pair: Sequence[Any]) -> dict[str, float]:
    worst, agree, positions = 0.0, 0, 0
    generator = torch.Generator().manual_seed(2)
    for backend in pair:
        backend.reserve(8, len(setting.prompts[0]) + 64)
        for slot, prompt in enumerate(setting.prompts):
            backend.forward(torch.tensor([prompt], device=setting.device), [0], first_slot=slot, logits=False)
    for rows, width in _shapes():
        tokens = torch.randint(0, pair[0].vocab_size, (rows, width), generator=generator).to(setting.device)
        starts = [len(setting.prompts[0]) - row for row in range(rows)]
        one, other = (b.forward(tokens, starts, first_slot=0, logits=True).float() for b in pair)
        worst = max(worst, float((one - other).abs().max() / one.abs().max()))
        agree, positions = agree + int((one.argmax(-1) == other.argmax(-1)).sum()), positions + rows * width
    tokens, starts = torch.zeros(1, 1, dtype=torch.int64, device=setting.device), [len(setting.prompts[0]) - 2]
    own, other = (pair[0].forward(tokens, starts, first_slot=slot, logits=True).float() for slot in (0, 1))
    controller = float((own - other).abs().max() / own.abs().max())
    share = agree / positions
    return {"largest_relative_difference": worst, "share_of_equal_argmax": share, "of_other_contexts": controller}
