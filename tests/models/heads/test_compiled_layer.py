"""A head's layer in one call of the kernels computes what its operators do, and a step reads one token only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.models.cpu.packed_linear import compressed_or_packed
from slipstream.models.heads.head_backend import HeadBackend, HeadSession
from slipstream.models.heads.network import HeadConfig, HeadNetwork, HeadWeights
from slipstream.reproducibility.timing import time_drafts
from tests.models.heads.test_heads import decoder_of, target
from tests.support.head_cases import write_head
from tests.support.markers import needs_kernels

SIZE, INNER, VOCABULARY, ROWS, LAYERS = 128, 256, 96, 3, 2
CONFIG = HeadConfig(
    layers=tuple(range(LAYERS)),
    hidden_size=SIZE,
    target_hidden_size=SIZE,
    intermediate_size=INNER,
    num_heads=4,
    num_key_heads=2,
    head_dim=64,
    vocab_size=VOCABULARY,
    eps=1e-5,
    rope_theta=10000.0,
    max_length=512,
)


class FeatureTable:
    """A target with random features: [slots, positions, layers * size]."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.features = torch.randn(ROWS, 64, LAYERS * SIZE, generator=generator).bfloat16()

    def keep_hidden_states(self, layers: Sequence[int]) -> None:
        assert tuple(layers) == CONFIG.layers

    def hidden_states(self, layers: Sequence[int], slot: int, start: int, stop: int) -> Tensor:
        return self.features[slot, start:stop]


class ReadSlot:
    """A slot of which the target has read `base` positions."""

    def __init__(self, base: int) -> None:
        self.base = base


def network(head_norms: bool = False) -> HeadNetwork:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16()

    def product(outputs: int, inputs: int) -> nn.Module:
        linear = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        linear.weight = nn.Parameter(random(outputs, inputs), requires_grad=False)
        return compressed_or_packed(linear)

    heads = (CONFIG.num_heads + 2 * CONFIG.num_key_heads) * CONFIG.head_dim
    weights = HeadWeights(
        fc=product(SIZE, LAYERS * SIZE),
        qkv=product(heads, 2 * SIZE),
        out=product(SIZE, CONFIG.num_heads * CONFIG.head_dim),
        gate_up=product(2 * INNER, SIZE),
        down=product(SIZE, INNER),
        lm_head=product(VOCABULARY, SIZE),
        **{name: 1 + 0.3 * random(SIZE) for name in ("token_norm", "hidden_norm", "middle_norm", "final_norm")},
    )
    if head_norms:
        norms = [1 + 4 * random(CONFIG.head_dim) for _ in range(2)]
        counts = CONFIG.num_heads, CONFIG.num_key_heads
        weights.head_norms = torch.cat([norm.expand(n, 1, -1) for norm, n in zip(norms, counts, strict=True)])
    return HeadNetwork(CONFIG, weights, nn.Embedding.from_pretrained(random(VOCABULARY, SIZE) * 8))


def outputs(head: HeadNetwork, starts: Sequence[Sequence[int]], compiled: bool) -> list[Tensor]:
    """Logits of forwards over rows that begin at these positions, five tokens wide at first, then one."""
    backend = HeadBackend(head)
    if not compiled:
        backend._compiled = None
    backend.attach(FeatureTable(), [ReadSlot(base) for base in (9, 4, 30)])  # type: ignore[list-item]
    backend.reserve(ROWS, 64)
    generator, all_logits = torch.Generator().manual_seed(7), []
    for begin in starts:
        width = 5 if not all_logits else 1
        tokens = torch.randint(0, VOCABULARY, (len(begin), width), generator=generator)
        all_logits.append(backend.forward(tokens, list(begin), first_slot=0, logits=True).float())
    return all_logits


@pytest.mark.parametrize("length", [1, 224, 256, 300])
def test_memory_reaches_as_far_as_the_kernels_read(length: int) -> None:
    """They read keys 32 at a time, from a view that begins at position 1."""
    backend = HeadBackend(network())
    for reserved in (1, length):
        backend.reserve(1, reserved)
        assert backend._keys.shape[2] >= 1 + 32 * -(-reserved // 32)


@needs_kernels
@pytest.mark.parametrize("flags", [{}, {"norm_before_residual": True}, {"windows": (3,)}], ids=str)
@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize(
    "starts", [[[0], [5], [6]], [[0, 0, 0], [5, 5, 5], [6, 6, 6]], [[0, 2, 30], [5, 1, 35], [6, 2, 36]]]
)
def test_one_call_computes_what_the_operators_do(
    starts: list[list[int]], head_norms: bool, flags: dict[str, Any]
) -> None:
    head = network(head_norms)
    head.config = replace(CONFIG, **flags)
    assert HeadBackend(head)._compiled is not None
    for fast, plain in zip(outputs(head, starts, True), outputs(head, starts, False), strict=True):
        assert float((fast - plain).norm()) < 0.02 * float(plain.norm())


@needs_kernels
@pytest.mark.parametrize("wrong", [{"windows": (3,)}, {"norm_before_residual": True}], ids=str)
def test_other_settings_are_noticed(wrong: dict[str, Any]) -> None:
    head, starts = network(), [[0, 0, 0], [5, 5, 5]]
    plain = outputs(head, starts, False)[-1]
    head.config = replace(CONFIG, **wrong)
    assert float((outputs(head, starts, True)[-1] - plain).norm()) > 0.02 * float(plain.norm())


@needs_kernels
def test_wrong_rotations_are_noticed() -> None:
    """Negative control: positions are rotated by other angles."""
    head, starts = network(), [[0, 0, 0], [5, 5, 5]]
    plain = outputs(head, starts, False)[-1]
    head._cosines = head._cosines[torch.randperm(len(head._cosines), generator=torch.Generator().manual_seed(1))]
    assert float((outputs(head, starts, True)[-1] - plain).norm()) > 0.02 * float(plain.norm())


@pytest.mark.slow
def test_a_step_of_a_new_text_reads_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration drafts for texts that the target has not read; it must time a step, not the reading of the text."""
    draft = decoder_of(write_head(tmp_path, target())).draft
    assert draft is not None
    widths: list[int] = []
    forward = HeadBackend.forward

    def recorded(self: HeadBackend, tokens: Tensor, *args: object, **options: object) -> Tensor:
        widths.append(tokens.shape[1])
        return forward(self, tokens, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(HeadBackend, "forward", recorded)
    session = HeadSession(draft.backend)
    session.reserve(3, 256)
    time_drafts(session, 3)
    assert widths.count(1) > 3 * (len(widths) - widths.count(1))
