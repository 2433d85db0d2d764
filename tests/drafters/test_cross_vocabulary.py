"""A draft model of another vocabulary: the text stays the target's to the bit, and its cache follows its own tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.types import Row
from slipstream.drafters.cross_vocabulary import bridged_session
from slipstream.drafters.cross_vocabulary.continuation import Continuation
from slipstream.models.toy import load_toy
from slipstream.sampling.sampler import Sampler
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.vocabulary_bridge import VocabularyBridge
from tests.support.markers import mostly_slow
from tests.support.tiny_models import WINDOW
from tests.support.vocabularies import KINDS, FableBackend, decoder_of, fable_model, speaking, tokenizer, vocabulary

PROMPTS = ["The heron was slow", "It flew ahead of the heron and", '"I am fast," said the']
GREEDY = [SamplingParams(max_tokens=40)] * 3
SAMPLED = [SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=seed) for seed in range(3)]
PENALISED = [SamplingParams(max_tokens=30, temperature=t, repetition_penalty=1.2, seed=3) for t in (0.0, 0.7, 1.0)]
OPTIONS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED, "mixed": [GREEDY[0], *SAMPLED[1:]]}
SAME = ({"prefixed", "metaspace"}, {"bytes", "normalised"})  # these have the same tokens
PAIRS = [(a, b) for a in ("toy", *KINDS) for b in ("toy", *KINDS) if a != b and {a, b} not in SAME]
FEW = [("bytes", "sentencepiece"), ("toy", "digits")]
CASES = [(*pair, options) for pair in PAIRS for options in (OPTIONS if pair in FEW else ("mixed",))]
LENGTHS: tuple[int | str, ...] = (1, 4, "auto")
EVERY_WAY = [(drafter, n) for drafter in ("model", "model:p=40", "cross_vocabulary", "hybrid") for n in LENGTHS]
ONCE_EACH = [("model", 1), ("model:p=40", 4), ("cross_vocabulary", "auto"), ("hybrid", 4)]

pytestmark = pytest.mark.usefixtures("cache_audit")


def made(target: str, draft: str, **settings: Any) -> SpeculativeDecoder:
    pair = [load_toy("toy") if kind == "toy" else fable_model(kind) for kind in (target, draft)]
    decoder = decoder_of(*pair, **{"num_draft_tokens": 4, "max_batch_size": 4} | settings)
    assert decoder._models.bridged is not None
    return decoder


def texts(decoder: SpeculativeDecoder, params: list[SamplingParams], *, chat: bool = False) -> list[list[int]]:
    return [result.token_ids for result in decoder.generate(PROMPTS, params, chat=chat)]


def acceptance(decoder: SpeculativeDecoder, params: list[SamplingParams] = GREEDY) -> float:
    results = decoder.generate(PROMPTS, params, chat=False)
    drafted = sum(result.stats.num_draft_tokens for result in results)
    return sum(result.stats.num_accepted_tokens for result in results) / max(1, drafted)


# the text


@pytest.mark.each_value
@pytest.mark.parametrize(("target", "draft", "options"), mostly_slow(CASES, ("bytes", "sentencepiece", "mixed")))
def test_the_text_is_the_plain_text_to_the_bit(target: str, draft: str, options: str) -> None:
    decoder, params = made(target, draft), OPTIONS[options]
    plain = texts(decoder.using("none"), params)
    for drafter, length in EVERY_WAY if (target, draft) in FEW else ONCE_EACH:
        assert texts(decoder.using(drafter, num_draft_tokens=length), params) == plain
    assert texts(decoder.using("auto", num_draft_tokens="auto"), params) == plain
    assert acceptance(decoder.using("model"), params) > 0.1


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt2"])
@pytest.mark.parametrize("options", ["greedy", "sampled"])
def test_transformers_leave_the_text_alone_too(name: str, options: str) -> None:
    params = [SamplingParams(max_tokens=4 * WINDOW, temperature=one.temperature, seed=5) for one in OPTIONS[options]]
    target, draft = speaking("bytes", architecture=name), speaking("sentencepiece", 1, architecture=name)
    decoder = SpeculativeDecoder(
        target,
        draft,
        tokenizer=tokenizer("bytes"),
        draft_tokenizer=tokenizer("sentencepiece"),
        num_draft_tokens=3,
        max_batch_size=3,
    )
    plain = texts(decoder.using("none"), params)
    assert texts(decoder.using("model"), params) == plain
    assert texts(decoder.using("auto"), params) == plain
    assert [decoder.using("model").generate(p, params[0], chat=False).token_ids for p in PROMPTS[:1]] == plain[:1]


def test_auto_takes_it_and_it_drafts_much_of_a_text_both_models_know() -> None:
    decoder = made("normalised", "digits", num_draft_tokens="auto")
    assert decoder.drafter_name == "hybrid"
    assert acceptance(decoder.using("model", num_draft_tokens=4)) > 0.8


def test_sampled_drafts_race_with_the_targets_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With others a sampled token is guessed right about as often as two draws agree."""
    hot = [SamplingParams(max_tokens=60, temperature=2.0, seed=seed) for seed in range(3)]
    decoder = made("bytes", "digits").using("model")
    coupled, real = acceptance(decoder, hot), Sampler.draw_at

    def elsewhere(self: Sampler, probs: torch.Tensor, offsets: torch.Tensor, width: int) -> torch.Tensor:
        return real(self, probs, offsets + 7, width + 7)

    monkeypatch.setattr(Sampler, "draw_at", elsewhere)
    assert acceptance(decoder, hot) < 0.7 * coupled


def test_it_works_while_rows_come_go_and_are_cancelled() -> None:
    decoder = made("digits", "sentencepiece", max_batch_size=2, num_draft_tokens=3).using("model")
    params = [SamplingParams(max_tokens=n, temperature=t, seed=n) for n, t in ((5, 0.0), (40, 0.8), (12, 0), (33, 1))]
    prompts = [PROMPTS[0], PROMPTS[1], "A heron and a sparrow " * 60, PROMPTS[2]]
    rows = decoder.rows(prompts, params, chat=False)
    scheduler = decoder.scheduler()
    for row in rows:
        scheduler.add(row)
    for step in range(400):
        if step == 4:
            scheduler.cancel(rows[1])
        if not scheduler.unfinished:
            break
        scheduler.step()
    plain = decoder.using("none").generate(prompts, params, chat=False)
    for row, result in zip(rows, plain, strict=True):
        assert row.output == result.token_ids[: row.num_output_tokens]
    assert [row.finish_reason for row in rows].count("cancelled") == 1
    assert [row.num_output_tokens for row in rows if row.finish_reason != "cancelled"] == [
        len(one.token_ids) for i, one in enumerate(plain) if i != 1
    ]


def test_a_stop_string_ends_the_text_where_plain_decoding_does() -> None:
    decoder, params = made("bytes", "sentencepiece"), SamplingParams(max_tokens=60, stop=["looked at"])
    plain = decoder.using("none").generate(PROMPTS[0], params, chat=False)
    result = decoder.using("model").generate(PROMPTS[0], params, chat=False)
    assert plain.finish_reason == "stop" and (result.text, result.token_ids) == (plain.text, plain.token_ids)


def test_a_processor_that_fails_on_a_draft_that_is_not_the_text_fails_no_row() -> None:
    decoder = made("bytes", "sentencepiece").using("model")
    plain = decoder.using("none").generate(PROMPTS[0], SamplingParams(max_tokens=20), chat=False).token_ids
    start = len(decoder.encode(PROMPTS[0], chat=False))

    def strict(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = ids[0, start:].tolist()
        if said[:-1] == plain[: len(said) - 1] and said != plain[: len(said)] and len(said) > 12:
            raise ValueError("asked about a text that is none")
        return scores

    params = SamplingParams(max_tokens=12, logits_processors=[strict])
    assert decoder.generate(PROMPTS[0], params, chat=False).token_ids == plain[:12]


# wrong bridges


def wrong_boundary(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bridged_session, "first_unsettled", lambda encoding, text, longest: max(0, len(encoding.ids) - 1))


def wrong_position(patch: pytest.MonkeyPatch) -> None:
    real = Continuation.tokens
    patch.setattr(Continuation, "tokens", lambda self: real(self)[1:])


def wrong_context(patch: pytest.MonkeyPatch) -> None:
    real = bridged_session.DraftText.follow
    patch.setattr(bridged_session.DraftText, "follow", lambda self, tokens: real(self, tokens[:-1]))


@pytest.mark.parametrize("wrong", [wrong_boundary, wrong_position, wrong_context])
@pytest.mark.parametrize("params", mostly_slow([GREEDY, SAMPLED], GREEDY), ids=["greedy", "sampled"])
def test_a_wrong_bridge_accepts_less_and_changes_no_text(
    wrong: Callable[[pytest.MonkeyPatch], None], params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = made("toy", "bytes").using("model")
    plain, right = texts(decoder.using("none"), params), acceptance(decoder, params)
    wrong(monkeypatch)
    assert acceptance(decoder, params) < right
    assert texts(decoder, params) == plain


# what the draft model reads


def counted(decoder: SpeculativeDecoder) -> list[int]:
    """Widths of the draft model's forwards, as they come."""
    assert decoder.draft is not None
    backend, widths = decoder.draft.backend, list[int]()
    real = backend.forward

    def forward(tokens: Any, *args: Any, **options: Any) -> Any:
        widths.append(tokens.shape[1])
        return real(tokens, *args, **options)

    backend.forward = forward  # type: ignore[method-assign]
    return widths


def test_only_what_is_missing_is_read() -> None:
    decoder = made("bytes", "sentencepiece").using("model")
    widths = counted(decoder)
    result = decoder.generate("A heron and a sparrow shared a river. " * 20, SamplingParams(max_tokens=40), chat=False)
    longest = max(widths)
    assert longest > 100 and sum(width > 16 for width in widths) == 1
    assert result.stats.num_accepted_tokens > 0


def test_a_chat_is_rendered_by_the_draft_models_own_template() -> None:
    decoder = made("bytes", "sentencepiece").using("model")
    row = decoder.rows(["The heron"], SamplingParams(max_tokens=6))[0]
    list(decoder.run([row]))
    assert row.messages == [{"role": "user", "content": "The heron"}]
    rendered = HFTokenizer(tokenizer("sentencepiece")).chat(row.messages)
    assert read_by_draft(decoder, row)[: len(rendered)] == rendered


def test_a_chat_that_its_template_refuses_is_read_as_the_target_renders_it() -> None:
    class Refusing(HFTokenizer):
        def chat(self, messages: Any) -> list[int]:
            raise UsageError("never")

    draft = replace(fable_model("sentencepiece"), tokenizer=Refusing(tokenizer("sentencepiece")))
    decoder = decoder_of(fable_model("bytes"), draft, num_draft_tokens=3, drafter="model")
    row = decoder.rows(["The heron"], SamplingParams(max_tokens=6))[0]
    list(decoder.run([row]))
    assert decoder._models.bridged is not None
    special, got = decoder._models.bridged.bridge.draft.special, read_by_draft(decoder, row)
    # the tokenizer's own opening, then the target's role markers as the draft model's of the same names
    assert got[:2] == [special["<|user|>"]] * 2 and special["<|model|>"] in got


def read_by_draft(decoder: SpeculativeDecoder, row: Row) -> list[int]:
    bridged = decoder._models.bridged
    assert bridged is not None
    return list(bridged.draft_rows([row], 1)[0].tokens)


def test_samples_of_one_prompt_share_its_messages() -> None:
    decoder = made("bytes", "sentencepiece", drafter="model")
    result = decoder.generate("The heron", SamplingParams(n=2, max_tokens=5, temperature=1.0, seed=1))
    plain = decoder.using("none").generate("The heron", SamplingParams(n=2, max_tokens=5, temperature=1.0, seed=1))
    assert [one.token_ids for one in result.alternatives] == [one.token_ids for one in plain.alternatives]


def test_a_text_longer_than_the_draft_models_context_is_drafted_for_from_its_end() -> None:
    target, draft = fable_model("bytes"), fable_model("sentencepiece", max_length=64)
    decoder = decoder_of(target, draft, num_draft_tokens=3, drafter="model")
    params = SamplingParams(max_tokens=60)
    prompt = "A heron and a sparrow shared a river. The heron was slow and never wrong. It looked at the water for"
    result = decoder.generate(prompt * 4, params, chat=False)
    assert result.token_ids == decoder.using("none").generate(prompt * 4, params, chat=False).token_ids
    assert result.stats.acceptance_rate is not None and result.stats.acceptance_rate > 0.4


# rules that need a distribution


@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_drafts_for_other_rules_are_of_shared_tokens_with_their_distribution(rule: str) -> None:
    decoder = made("bytes", "sentencepiece", drafter="model", acceptance=rule)
    bridged = decoder._models.bridged
    assert bridged is not None
    results = decoder.generate(PROMPTS, SAMPLED, chat=False)
    drafted = [token for result in results for done in result.rounds for token in done.draft]
    assert drafted and set(drafted) <= bridged.bridge.shared.keys()
    assert decoder.lossless and sum(result.stats.num_accepted_tokens for result in results) > 0
    greedy = texts(decoder, GREEDY)
    assert greedy == texts(decoder.using("none"), GREEDY)


def test_rules_that_need_a_distribution_are_refused_where_no_token_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VocabularyBridge, "shared", {})
    with pytest.raises(
        UsageError, match="draft 'sentencepiece-420' shares no token with target 'bytes-420'"
    ) as refusal:
        made("bytes", "sentencepiece", drafter="model", acceptance="block")
    assert "allowed: acceptance 'auto' or 'match'" in str(refusal.value) and "\n" not in str(refusal.value)
    assert acceptance(made("bytes", "sentencepiece", drafter="model")) > 0.2  # without shared tokens it still drafts


def test_it_needs_a_draft_model_of_another_vocabulary() -> None:
    with pytest.raises(UsageError, match="needs a draft model of another vocabulary; give draft="):
        SpeculativeDecoder("toy", drafter="cross_vocabulary")
    with pytest.raises(UsageError, match="needs a draft model of another vocabulary; allowed: 'model'"):
        SpeculativeDecoder("toy", "toy:2", drafter="cross_vocabulary")


def test_another_draft_model_can_take_its_place() -> None:
    decoder = SpeculativeDecoder(
        speaking("bytes"), speaking("bytes", 1), tokenizer=tokenizer("bytes"), num_draft_tokens=3, reproducible=False
    )
    other = decoder.with_draft(speaking("sentencepiece", 2), tokenizer("sentencepiece"))
    plain = texts(decoder.using("none"), GREEDY)
    assert texts(other.using("model", num_draft_tokens=3), GREEDY) == plain == texts(decoder, GREEDY)


class GreedyRounds(FableBackend):
    """Drafts a greedy round in one call, as captured graphs on a GPU do."""

    calls = 0

    def draft_greedy(
        self, tokens: torch.Tensor, starts: list[int], counts: list[int], *, steps: int, vocab_size: int
    ) -> torch.Tensor:
        self.calls += 1
        logits = self.forward(tokens, starts, first_slot=0, logits=True)
        columns = [logits[torch.arange(len(counts)), torch.tensor(counts) - 1, :vocab_size].argmax(-1)]
        for step in range(steps - 1):
            at = [start + count + step for start, count in zip(starts, counts, strict=True)]
            following = self.forward(columns[-1][:, None], at, first_slot=0, logits=True)
            columns.append(following[:, 0, :vocab_size].argmax(-1))
        return torch.stack(columns, dim=1)

    def verify_greedy(self, *args: Any, **options: Any) -> torch.Tensor:
        raise AssertionError("a draft model verifies nothing")


def test_a_draft_made_in_one_call_is_the_draft_made_step_by_step() -> None:
    kind, stepwise = "sentencepiece", made("bytes", "sentencepiece").using("model")
    draft = fable_model(kind)
    backend = GreedyRounds(vocabulary(kind), 3)
    decoder = decoder_of(fable_model("bytes"), replace(draft, backend=backend), num_draft_tokens=4, drafter="model:p=0")
    both = [one.generate(PROMPTS, GREEDY, chat=False) for one in (decoder, stepwise)]
    assert backend.calls > 0
    assert [[done.draft for done in one.rounds] for one in both[0]] == [
        [done.draft for done in one.rounds] for one in both[1]
    ]
    assert texts(decoder, SAMPLED) == texts(stepwise, SAMPLED)
