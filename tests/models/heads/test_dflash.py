"""DFlash heads: a block is drafted in one forward, and heads that do not fit are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.models.heads.dflash import DFlashBackend
from tests.models.heads.test_head_files import SPARK, Layout, named
from tests.models.heads.test_recorded_heads import PROMPTS, TARGET, changed, decoder_of, plain
from tests.support.draft_steps import pair_of, same_logits, step_logits
from tests.support.tiny_models import fresh, tokenizer

BLOCK, ROUNDS = 5, 16
AUTHORS = Layout("dflash", named("DFlashDraftModel", dflash_config=SPARK))


def written(folder: Path, changes: dict[str, Any]) -> str:
    """The recorded head in the layout of its authors, with other settings."""
    file = AUTHORS.write(folder) / "config.json"
    settings = json.loads(file.read_text())
    for name, value in changes.items():
        (settings["dflash_config"] if name in settings["dflash_config"] else settings)[name] = value
    file.write_text(json.dumps(settings))
    return str(folder)


def test_the_layout_of_the_authors_is_read_as_that_of_speculators(tmp_path: Path) -> None:
    """But for windows: rows of a block see those after them, too."""
    folders = (
        AUTHORS.write(tmp_path / "authors"),
        changed(tmp_path / "s", "dflash", {"sliding_window_non_causal": True}),
    )
    recorded = changed(tmp_path / "recorded", "dflash", {})
    for text in PROMPTS:
        steps, expected, causal = (step_logits(pair_of(TARGET, x), text, BLOCK - 1) for x in (*folders, recorded))
        assert all(same_logits(steps, expected)) and not any(same_logits(steps, causal))


@pytest.mark.slow
def test_a_batch_drafts_blocks_in_one_forward_per_round_however_long_drafts_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, forwards, original = decoder_of("dflash", num_draft_tokens=9), list[bool](), DFlashBackend.forward

    def forward(backend: DFlashBackend, tokens: Any, *args: Any, logits: bool, **options: Any) -> Any:
        forwards.append(logits)
        return original(backend, tokens, *args, logits=logits, **options)

    monkeypatch.setattr(DFlashBackend, "forward", forward)
    params = SamplingParams(max_tokens=ROUNDS, ignore_eos=True)
    results = decoder.generate(PROMPTS[:3], params)
    assert [result.token_ids for result in results] == [plain().generate(x, params).token_ids for x in PROMPTS[:3]]
    assert 0 < sum(forwards) <= ROUNDS
    assert max(len(round.draft) for result in results for round in result.rounds) == BLOCK - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 99}, "its vocab_size is 99, that of"),
        ({"hidden_size": 48}, "its hidden_size is 48, that of"),
        ({"block_size": 1}, "block_size=1; allowed: 2 to 255"),
        ({"mask_token_id": None}, "mask_token_id=None; allowed: 0 to 60"),
        ({"mask_token_id": 61}, "mask_token_id=61; allowed: 0 to 60"),
        ({"mask_token_id": True}, "mask_token_id=True; allowed: 0 to 60"),
        *(
            ({"target_layer_ids": layers}, f"reads layers {layers!r} of its target; ")
            for layers in ([1, 9], [], 3, "x", [True], ["x"], [1.5])
        ),
        ({"layer_types": ["sliding_attention"]}, "layer_types=['sliding_attention']; allowed: 'sliding_attention' or"),
        ({"is_causal": True}, "is_causal=True; allowed: False"),
        ({"causal": True}, "causal=True; allowed: False"),
        ({"norm_before_fc": True}, "norm_before_fc=True; allowed: False"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5; allowed: 1"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier=12.0, which is unknown and may change"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0; allowed: None"),
        ({"num_hidden_layers": 3}, "'full_attention' for each of its 3 layers"),
        ({"intermediate_size": 41}, "tensor 'layers.0.mlp.gate_proj.weight' is [12, 8]; allowed: [41, 8]"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SlipstreamError) as raised:
        SpeculativeDecoder(TARGET, written(tmp_path, change), drafter="model")
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_layers_that_no_setting_names_are_those_of_the_authors_code(tmp_path: Path) -> None:
    model = fresh("llama", num_hidden_layers=5, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    folder = written(tmp_path, {"target_layer_ids": None})
    backend = SpeculativeDecoder(model, folder, tokenizer=tokenizer(), drafter="model").draft.backend
    assert backend.feature_layers == (2, 3)  # what leaves layers 1 and 5 - 3
