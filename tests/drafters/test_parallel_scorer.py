"""PARD draft models: one forward over mask tokens scores a whole draft."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.config import DecoderConfig
from slipstream.core.session import Session
from slipstream.drafters.model.model_drafter import ModelDrafter
from slipstream.drafters.model.parallel_scorer import MOST
from slipstream.wiring.model_pair import ModelPair
from tests.support.draft_steps import same_logits, step_logits
from tests.support.plain_texts import alone_and_together
from tests.support.tiny_models import VOCAB, fresh, prompts, shared, tokenizer

MASK = 5


@cache
def draft_model() -> Any:
    model = fresh("llama", seed=3)
    model.config.pard_token = MASK
    return model


@torch.inference_mode()
def transcribed(text: list[int], count: int, mask: int = MASK) -> list[torch.Tensor]:
    logits = draft_model()(input_ids=torch.tensor([[*text, *[mask] * (count - 1)]])).logits[0, -count:]
    return list(logits)


def pair() -> ModelPair:
    return ModelPair.load(shared("llama"), draft_model(), DecoderConfig(reproducible=False), tokenizer())


def test_every_step_is_that_of_one_forward_over_mask_tokens() -> None:
    models = pair()
    for text in prompts([2, 17, 40]):
        logits = step_logits(models, text, 6)
        assert all(same_logits(logits, transcribed(text, 6)))
        assert not any(same_logits(logits[1:], transcribed(text, 6, mask=MASK + 1)[1:]))


def test_a_draft_longer_than_one_forward_continues_after_its_own_tokens() -> None:
    text = prompts([17])[0]
    all_logits = step_logits(pair(), text, MOST + 2)
    drafted = [int(logits.argmax()) for logits in all_logits[:MOST]]
    assert all(same_logits(all_logits[MOST:], transcribed([*text, *drafted], 2)))


def decoder_of(**settings: Any) -> SpeculativeDecoder:
    options: dict[str, Any] = {"drafter": "model", "num_draft_tokens": 4, "max_batch_size": 3} | settings
    return SpeculativeDecoder(shared("llama"), draft_model(), tokenizer=tokenizer(), **options)


FAVORED = {7: 30.0, 9: 30.0}


def drafts_agree(decoder: SpeculativeDecoder) -> bool:
    """Whether all drafts are those of `transcribed`. Two tokens are favored, so that drafts are accepted."""
    texts, bias = prompts([3, 17, 9]), torch.zeros(VOCAB)
    bias[list(FAVORED)] = torch.tensor(list(FAVORED.values()))
    results = decoder.generate(texts, SamplingParams(max_tokens=24, ignore_eos=True, logit_bias=FAVORED))
    drafts = []
    for prompt, result in zip(texts, results, strict=True):
        text = [*prompt, *result.token_ids]
        for round in (round for round in result.rounds if round.draft):
            expected = transcribed(text[: round.start], len(round.draft))
            drafts.append(list(round.draft) == [int((logits + bias).argmax()) for logits in expected])
    assert len(drafts) > 10 and sum(result.stats.num_accepted_tokens for result in results) > 3
    return all(drafts)


@pytest.mark.slow
def test_drafts_of_a_batch_take_one_forward_per_round_and_leave_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards, score = [], Session.score

    def count(session: Session, rows: Any, draft: Any, *args: Any, **options: Any) -> Any:
        forwards.append((session, draft.shape[1]))
        return score(session, rows, draft, *args, **options)

    monkeypatch.setattr(Session, "score", count)
    decoder = decoder_of()
    assert drafts_agree(decoder)
    widths = [width for session, width in forwards if session is decoder._models.draft_session]
    assert len(widths) <= 24 and set(widths) <= {0, 1, 2, 3}


def test_masks_that_stay_in_the_cache_change_later_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if masks count as accepted drafts, later drafts read them."""
    monkeypatch.setattr(Session, "keep_drafts", lambda session, lengths: None)
    assert not drafts_agree(decoder_of())


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8, "seed": 5}],
    ids=["greedy", "seeded"],
)
@pytest.mark.parametrize("drafter", ["model", "auto"])
def test_texts_are_those_of_plain_decoding_alone_and_in_batches(drafter: str, options: dict[str, Any]) -> None:
    decoder = decoder_of(drafter=drafter, num_draft_tokens="auto" if drafter == "auto" else 4)
    texts, params = prompts([3, 17, 9, 40, 5]), SamplingParams(max_tokens=24, **options)
    alone_and_together(decoder, texts, params)


@pytest.mark.parametrize("acceptance", ["block", "rejection"])
def test_sampled_drafts_carry_the_distributions_they_were_drawn_from(
    monkeypatch: pytest.MonkeyPatch, acceptance: str
) -> None:
    """Each is the draft model's after the text and masks, whatever earlier draft tokens are."""
    differences, inner = list[torch.Tensor](), ModelDrafter.propose

    def propose(drafter: ModelDrafter, rows: Any, lengths: Any, sampler: Any) -> Any:
        draft = inner(drafter, rows, lengths, sampler)
        if draft.probs is not None:
            expected = torch.stack(transcribed(list(rows[0].tokens), draft.probs.shape[1])).div(0.8).softmax(-1)
            differences.append((draft.probs[0] - expected).abs().max())
        return draft

    monkeypatch.setattr(ModelDrafter, "propose", propose)
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)
    decoder_of(acceptance=acceptance).generate(prompts([17])[0], params)
    assert len(differences) > 4 and max(differences) < 1e-5


def test_a_mask_outside_the_vocabulary_is_refused_in_one_line() -> None:
    model = fresh("llama", seed=3)
    model.config.pard_token = True
    with pytest.raises(UsageError, match=r"has pard_token=True; allowed: 0 to 60"):
        ModelPair.load(shared("llama"), model, DecoderConfig(reproducible=False), tokenizer())
    model.config.pard_token = 999
    with pytest.raises(UsageError, match=r"has pard_token=999; allowed: 0 to 60"):
        SpeculativeDecoder(shared("llama"), model, tokenizer=tokenizer(), drafter="model")


def test_a_model_of_pard_2_drafts_without_hidden_states_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = fresh("llama", seed=3)
    model.config.update({"pard_token": MASK, "spd_type": "pard2", "pard2": True, "pard2_target_layers": [1]})
    models = ModelPair.load(shared("llama"), model, DecoderConfig(reproducible=False), tokenizer())
    assert [message for message in caplog.messages if "PARD-2" in message and "without them" in message]
    text = prompts([17])[0]
    assert all(same_logits(step_logits(models, text, 4), transcribed(text, 4)))
