"""Grouped attention computes what transformers' own does; other models keep their attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import SlipstreamError
from slipstream.models.decoder import attention as grouped
from slipstream.models.decoder.attention import UngroupableError
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.fast_forwards import group_queries
from slipstream.models.hf.interfaces import AttentionInterface
from slipstream.models.hf.trials import OwnLogits
from slipstream.models.notices import warn_slower
from tests.support.tiny_models import fresh
from tests.support.tiny_models import ragged_logits as logits

FAST = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "olmo2", "gpt2")


@pytest.mark.each_value
@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_transformers_attention(name: str, dtype: torch.dtype) -> None:
    plain, fast = HFBackend(fresh(name, dtype=dtype)), HFBackend(fresh(name, dtype=dtype))
    group_queries(fast)
    assert fast.model.config.get_text_config()._attn_implementation == grouped.GROUPED
    expected, got = logits(plain), logits(fast)
    assert (expected - got).abs().max() <= {torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype] * expected.abs().max()


@pytest.mark.parametrize("repeats", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_forwards_attend_like_wide_ones(repeats: int, dtype: torch.dtype) -> None:
    """The kernels treat blocks of fewer than four rows differently; no block has so few."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2 * repeats, 16), (2, 512), (2, 512))
    query, key, value = (torch.randn(1, h, n, 64, generator=generator).to(dtype) for h, n in shapes)
    allowed = torch.arange(512) <= torch.arange(200, 216)[:, None]

    def attend(columns: int) -> Tensor:
        mask = grouped.group_mask(allowed[None, None, :columns], repeats, dtype)
        return grouped.grouped_attention(None, query[:, :, :columns], key, value, mask)[0]

    wide = attend(16)
    assert [width for width in range(1, 16) if not torch.equal(wide[:, :width], attend(width))] == []


@pytest.mark.parametrize(("width", "start"), [(33, 0), (77, 5), (256, 0), (96, 200)])
@pytest.mark.parametrize("window", [1000, 40])
def test_blocks_of_a_long_forward_attend_like_the_whole(width: int, start: int, window: int) -> None:
    generator, repeats, reads = torch.Generator().manual_seed(2), 3, (64, 128, 288)
    query, key, value = (torch.randn(1, h, n, 16, generator=generator) for h, n in ((6, width), (2, 512), (2, 512)))
    keys, columns = torch.arange(512), start + torch.arange(width)[:, None]
    mask = grouped.group_mask(((keys <= columns) & (keys > columns - window))[None, None], repeats, torch.float32)
    blocks = grouped.cut_mask(mask, [grouped.Cut(0, 0, 0, width, width, start)], reads)
    expected = [(first, *[min(64, width - first)] * 2) for first in range(0, width, 64)]
    assert [(block.token, block.width, block.count) for block in blocks] == expected
    for block in blocks:
        length_read, end = block.mask.shape[3], start + block.token + block.width
        assert length_read == min((length for length in (*reads, 512) if length >= end), default=512)
    by_blocks = grouped.attend_in_blocks(query, key, value, blocks, grouped.Scores())
    assert torch.allclose(by_blocks, grouped.attend(query, key, value, mask, grouped.Scores()), atol=1e-5)


def test_options_that_grouped_attention_lacks_are_refused() -> None:
    states = torch.zeros(1, 2, 4, 8)
    with pytest.raises(SlipstreamError, match="position_bias"):
        grouped.grouped_attention(None, states, states, states, torch.zeros(1, 1, 4, 4), position_bias=30.0)


def test_a_model_that_answers_differently_keeps_its_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any) -> tuple[Tensor, None]:
        return query.transpose(1, 2) * 3, None

    monkeypatch.setitem(AttentionInterface._global_mapping, grouped.GROUPED, wrong)
    backend = HFBackend(fresh("llama"))
    group_queries(backend)
    assert backend.model.config._attn_implementation == "sdpa" and backend.masks.repeats is None
    assert torch.isfinite(logits(backend)).all()


@pytest.mark.parametrize(("scale", "kept"), [(1.0, True), (1.1, False)])
def test_where_logits_show_nothing_attention_is_compared_call_by_call(
    scale: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(*inputs: Any, **options: Any) -> tuple[Tensor, None]:
        return grouped.grouped_attention(*inputs, **options)[0] * scale, None

    monkeypatch.setitem(AttentionInterface._global_mapping, grouped.GROUPED, scaled)
    monkeypatch.setattr(OwnLogits, "error", lambda self: 0.3)  # as in models whose layers make roundings grow
    backend = HFBackend(fresh("llama"))
    group_queries(backend)
    assert (backend.model.config._attn_implementation == grouped.GROUPED) is kept
    assert (backend.masks.repeats is not None) is kept
    assert torch.isfinite(logits(backend)).all()


class Raising:
    """An attention that raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: Any, **__: Any) -> None:
        raise self.error


@pytest.mark.parametrize("error", [UngroupableError("its attention uses softcap"), RuntimeError("sizes must match")])
def test_a_model_that_refuses_the_grouped_mask_keeps_its_own_attention_with_one_warning(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_slower.cache_clear()
    monkeypatch.setitem(AttentionInterface._global_mapping, grouped.GROUPED, Raising(error))
    for _ in range(2):
        backend = HFBackend(fresh("llama"))
        group_queries(backend)
        assert backend.model.config._attn_implementation == "sdpa" and backend.masks.repeats is None
        assert torch.isfinite(logits(backend)).all()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"slower than it could be: LlamaForCausalLM keeps transformers' attention: {error}"]


@pytest.mark.parametrize("error", [AttributeError("a typo"), TypeError("a typo"), KeyError("a typo")])
def test_a_bug_in_grouped_attention_is_raised(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, grouped.GROUPED, Raising(error))
    with pytest.raises(type(error), match="a typo"):
        group_queries(HFBackend(fresh("llama")))


def test_eager_models_keep_their_attention() -> None:
    backend = HFBackend(fresh("llama-eager"))
    group_queries(backend)
    assert backend.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("heads", "key_heads", "repeats"), [(4, 2, 2), (4, None, 1), (4, 3, None), ([4], 2, None)])
def test_heads_that_are_not_multiples_are_not_grouped(heads: Any, key_heads: Any, repeats: int | None) -> None:
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads)
    assert grouped.repeats_of(config) == repeats
