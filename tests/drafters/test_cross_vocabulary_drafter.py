"""A draft model of another vocabulary: the text is plain decoding's to the bit, and its cache follows the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.types import Draft, Row
from slipstream.drafters.cross_vocabulary import bridged_session
from slipstream.drafters.cross_vocabulary.continuation import Continuation
from slipstream.drafters.cross_vocabulary.cross_vocabulary_drafter import SharedTokenDrafter
from slipstream.models.toy import load_toy
from slipstream.sampling.sampler import Sampler
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.vocabulary_bridge import VocabularyBridge
from tests.support.markers import mostly_exhaustive, mostly_slow
from tests.support.tiny_models import WINDOW
from tests.support.vocabularies import KINDS, FableBackend, decoder_of, fable_model, speaking, tokenizer, vocabulary

PROMPTS = ["The heron was slow", "It flew ahead of the heron and", '"I am fast," said the']
GREEDY = [SamplingParams(max_tokens=30)] * 3
SAMPLED = [SamplingParams(max_tokens=30, temperature=0.9, top_p=0.95, seed=seed) for seed in range(3)]
PENALISED = [SamplingParams(max_tokens=30, temperature=t, repetition_penalty=1.2, seed=3) for t in (0.0, 0.7, 1.0)]
OPTIONS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED, "mixed": [GREEDY[0], *SAMPLED[1:]]}
SAME = ({"prefixed", "metaspace"}, {"bytes", "normalized"})  # these have the same tokens
PAIRS = [(a, b) for a in ("toy", *KINDS) for b in ("toy", *KINDS) if a != b and {a, b} not in SAME]
FEW = [("bytes", "sentencepiece"), ("toy", "digits")]
MIXED = [(*pair, "mixed") for pair in PAIRS]
OTHERS = [(*pair, options) for pair in FEW for options in ("greedy", "sampled", "penalised")]
ONCE_EACH = [("model", 1), ("model:p=40", 4), ("cross_vocabulary", "auto"), ("hybrid", 4)]

pytestmark = pytest.mark.usefixtures("cache_audit")


def bridged_decoder(target: str, draft: str, **settings: Any) -> SpeculativeDecoder:
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


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize(
    ("target", "draft", "options"),
    [*MIXED, *mostly_exhaustive(OTHERS)],
)
def test_the_text_is_that_of_plain_decoding(target: str, draft: str, options: str) -> None:
    decoder, params = bridged_decoder(target, draft), OPTIONS[options]
    plain = texts(decoder.using("none"), params)
    for drafter, length in ONCE_EACH if (target, draft) in FEW else ONCE_EACH[:1]:
        assert texts(decoder.using(drafter, num_draft_tokens=length), params) == plain
    assert texts(decoder.using("auto", num_draft_tokens="auto"), params) == plain
    assert acceptance(decoder.using("model"), params) > 0.1


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("name", mostly_exhaustive(["llama", "qwen2", "gemma3", "gpt2"], "gemma3"))
@pytest.mark.parametrize("options", mostly_exhaustive(["greedy", "sampled"], "sampled"))
def test_the_text_is_that_of_plain_decoding_with_transformers(name: str, options: str) -> None:
    params = [
        SamplingParams(max_tokens=4 * WINDOW, temperature=result.temperature, seed=5) for result in OPTIONS[options]
    ]
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


def test_auto_drafts_with_it_and_most_of_a_text_both_models_know_is_accepted() -> None:
    decoder = bridged_decoder("normalized", "digits", num_draft_tokens="auto")
    assert decoder.drafter_name == "hybrid"
    assert acceptance(decoder.using("model", num_draft_tokens=4)) > 0.8


@pytest.mark.slow
def test_sampled_drafts_use_the_targets_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With random numbers of its own, a draft is right only about as often as two draws agree."""
    hot = [SamplingParams(max_tokens=60, temperature=2.0, seed=seed) for seed in range(3)]
    decoder = bridged_decoder("bytes", "digits").using("model")
    coupled, real = acceptance(decoder, hot), Sampler.draw_at

    def elsewhere(self: Sampler, probs: torch.Tensor, offsets: torch.Tensor, width: int) -> torch.Tensor:
        return real(self, probs, offsets + 7, width + 7)

    monkeypatch.setattr(Sampler, "draw_at", elsewhere)
    assert acceptance(decoder, hot) < 0.7 * coupled


def test_texts_are_right_while_rows_enter_end_and_are_cancelled() -> None:
    decoder = bridged_decoder("digits", "sentencepiece", max_batch_size=2, num_draft_tokens=3).using("model")
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
        len(result.token_ids) for i, result in enumerate(plain) if i != 1
    ]


@pytest.mark.parametrize("options", [{"logit_bias": {80: 100.0}, "temperature": 0.3}, {"temperature": 1e-40}])
def test_options_that_make_scores_huge_leave_a_text_as_it_is(options: dict[str, Any]) -> None:
    decoder = bridged_decoder("bytes", "toy")
    params = [SamplingParams(max_tokens=20, seed=1, **options)] * 3
    assert texts(decoder.using("model:p=40"), params) == texts(decoder.using("none"), params)


def test_a_stop_string_ends_the_text_where_plain_decoding_does() -> None:
    decoder, params = bridged_decoder("bytes", "sentencepiece"), SamplingParams(max_tokens=60, stop=["looked at"])
    plain = decoder.using("none").generate(PROMPTS[0], params, chat=False)
    result = decoder.using("model").generate(PROMPTS[0], params, chat=False)
    assert plain.finish_reason == "stop" and (result.text, result.token_ids) == (plain.text, plain.token_ids)


def test_a_processor_that_fails_on_a_wrong_draft_does_not_fail_its_row() -> None:
    decoder = bridged_decoder("bytes", "sentencepiece").using("model")
    plain = decoder.using("none").generate(PROMPTS[0], SamplingParams(max_tokens=20), chat=False).token_ids
    start = len(decoder.encode(PROMPTS[0], chat=False))

    def strict(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = ids[0, start:].tolist()
        if output[:-1] == plain[: len(output) - 1] and output != plain[: len(output)] and len(output) > 12:
            raise ValueError("called with a text that is not the row's")
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
@pytest.mark.parametrize("params", mostly_exhaustive([GREEDY, SAMPLED], GREEDY), ids=["greedy", "sampled"])
def test_a_wrong_bridge_accepts_less_and_changes_no_text(
    wrong: Callable[[pytest.MonkeyPatch], None], params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = bridged_decoder("toy", "bytes").using("model")
    plain, right = texts(decoder.using("none"), params), acceptance(decoder, params)
    wrong(monkeypatch)
    assert acceptance(decoder, params) < right
    assert texts(decoder, params) == plain


# what the draft model reads


def counted(decoder: SpeculativeDecoder) -> list[int]:
    """The list to which each forward of the draft model adds its width."""
    assert decoder.draft is not None
    backend, widths = decoder.draft.backend, list[int]()
    real = backend.forward

    def forward(tokens: Any, *args: Any, **options: Any) -> Any:
        widths.append(tokens.shape[1])
        return real(tokens, *args, **options)

    backend.forward = forward  # type: ignore[method-assign]
    return widths


def test_a_long_prompt_is_read_once() -> None:
    decoder = bridged_decoder("bytes", "sentencepiece").using("model")
    widths = counted(decoder)
    result = decoder.generate("A heron and a sparrow shared a river. " * 20, SamplingParams(max_tokens=40), chat=False)
    longest = max(widths)
    assert longest > 100 and sum(width > 16 for width in widths) == 1
    assert result.stats.num_accepted_tokens > 0


def test_a_chat_is_rendered_by_the_draft_models_own_template() -> None:
    decoder = bridged_decoder("bytes", "sentencepiece").using("model")
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
    special, read = decoder._models.bridged.bridge.draft.special, read_by_draft(decoder, row)
    # the draft tokenizer's own first token, then the target's role markers as the draft model's of the same names
    assert read[:2] == [special["<|user|>"]] * 2 and special["<|model|>"] in read


def read_by_draft(decoder: SpeculativeDecoder, row: Row) -> list[int]:
    bridged = decoder._models.bridged
    assert bridged is not None
    return list(bridged.draft_rows([row], 1)[0].tokens)


def test_samples_of_one_chat_have_the_texts_of_plain_decoding() -> None:
    decoder = bridged_decoder("bytes", "sentencepiece", drafter="model")
    result = decoder.generate("The heron", SamplingParams(n=2, max_tokens=5, temperature=1.0, seed=1))
    plain = decoder.using("none").generate("The heron", SamplingParams(n=2, max_tokens=5, temperature=1.0, seed=1))
    assert [result.token_ids for result in result.alternatives] == [result.token_ids for result in plain.alternatives]


def test_a_text_longer_than_the_draft_models_context_is_drafted_from_its_end() -> None:
    target, draft = fable_model("bytes"), fable_model("sentencepiece", max_length=64)
    decoder = decoder_of(target, draft, num_draft_tokens=3, drafter="model")
    params = SamplingParams(max_tokens=60)
    prompt = "A heron and a sparrow shared a river. The heron was slow and never wrong. It looked at the water for"
    result = decoder.generate(prompt * 4, params, chat=False)
    assert result.token_ids == decoder.using("none").generate(prompt * 4, params, chat=False).token_ids
    assert result.stats.acceptance_rate is not None and result.stats.acceptance_rate > 0.4


# rules that need a distribution


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_rules_that_need_a_distribution_get_drafts_of_shared_tokens(rule: str) -> None:
    decoder = bridged_decoder("bytes", "sentencepiece", drafter="model", acceptance=rule)
    bridged = decoder._models.bridged
    assert bridged is not None
    results = decoder.generate(PROMPTS, SAMPLED, chat=False)
    drafted = [token for result in results for round in result.rounds for token in round.draft]
    assert drafted and set(drafted) <= bridged.bridge.shared.keys()
    assert decoder.lossless and sum(result.stats.num_accepted_tokens for result in results) > 0
    greedy = texts(decoder, GREEDY)
    assert greedy == texts(decoder.using("none"), GREEDY)


def test_rules_that_need_a_distribution_are_refused_where_no_token_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VocabularyBridge, "shared", {})
    with pytest.raises(
        UsageError, match="draft 'sentencepiece-420' shares no token with target 'bytes-420'"
    ) as refusal:
        bridged_decoder("bytes", "sentencepiece", drafter="model", acceptance="block")
    assert "allowed: acceptance 'auto' or 'match'" in str(refusal.value) and "\n" not in str(refusal.value)
    # without shared tokens it still drafts
    assert acceptance(bridged_decoder("bytes", "sentencepiece", drafter="model")) > 0.2


def test_cross_vocabulary_needs_a_draft_model_of_another_vocabulary() -> None:
    with pytest.raises(UsageError, match="needs a draft model of another vocabulary; give draft="):
        SpeculativeDecoder("toy", drafter="cross_vocabulary")
    with pytest.raises(UsageError, match="needs a draft model of another vocabulary; allowed: 'model'"):
        SpeculativeDecoder("toy", "toy:2", drafter="cross_vocabulary")


@pytest.mark.slow
def test_with_draft_takes_a_draft_model_of_another_vocabulary() -> None:
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
            positions = [start + count + step for start, count in zip(starts, counts, strict=True)]
            following = self.forward(columns[-1][:, None], positions, first_slot=0, logits=True)
            columns.append(following[:, 0, :vocab_size].argmax(-1))
        return torch.stack(columns, dim=1)

    def verify_greedy(self, *args: Any, **options: Any) -> torch.Tensor:
        raise AssertionError("a draft model verifies nothing")


@pytest.mark.slow
def test_a_draft_made_in_one_call_equals_one_made_step_by_step() -> None:
    vocabulary_kind, stepwise = "sentencepiece", bridged_decoder("bytes", "sentencepiece").using("model")
    draft = fable_model(vocabulary_kind)
    backend = GreedyRounds(vocabulary(vocabulary_kind), 3)
    decoder = decoder_of(fable_model("bytes"), replace(draft, backend=backend), num_draft_tokens=4, drafter="model:p=0")
    results = [result.generate(PROMPTS, GREEDY, chat=False) for result in (decoder, stepwise)]
    assert backend.calls > 0
    assert [[round.draft for round in result.rounds] for result in results[0]] == [
        [round.draft for round in result.rounds] for result in results[1]
    ]
    assert texts(decoder, SAMPLED) == texts(stepwise, SAMPLED)


PROMPT, RUNS, HOT = "The heron", 1600, 1.6


def make_decoder(rule: str) -> SpeculativeDecoder:
    pair = fable_model("bytes", 1), fable_model("digits", 2)
    options = {"num_draft_tokens": 2, "max_batch_size": 64, "reproducible": False}
    return decoder_of(*pair, drafter="model", acceptance=rule, **options)


def distance(decoder: SpeculativeDecoder) -> float:
    """Total variation between the frequencies of first tokens and the target's own distribution."""
    params = [SamplingParams(max_tokens=3, temperature=HOT, seed=seed) for seed in range(RUNS)]
    results = decoder.generate([PROMPT] * RUNS, params, chat=False)
    counts = Counter(result.token_ids[0] for result in results)
    probs = (decoder.next_logits(decoder.encode(PROMPT, chat=False)).float() / HOT).softmax(-1)
    return float(sum(abs(counts[token] / RUNS - p) for token, p in enumerate(probs.tolist()))) / 2


@pytest.mark.parametrize("rule", mostly_slow(["block", "rejection"], "rejection"))
def test_a_draft_carries_the_renormalized_distribution_over_the_shared_tokens(rule: str) -> None:
    decoder = make_decoder(rule)
    row = decoder.rows([PROMPT], SamplingParams(max_tokens=9, temperature=HOT, seed=5), chat=False)[0]
    bridged = decoder._models.bridged
    assert bridged is not None and isinstance(decoder.drafter, SharedTokenDrafter)
    sampler = Sampler([row], decoder._engine._race, decoder.target.backend.vocab_size, torch.device("cpu"))
    with torch.inference_mode():
        draft = decoder.drafter.propose([row], [2], sampler)
        draft_rows = bridged.draft_rows([row], 2)
        logits = bridged.session.score(draft_rows, torch.empty(1, 0, dtype=torch.int64), [0])[0, 0]
    assert draft.probs is not None and draft.lengths == (2,)
    shared = bridged.bridge.shared
    expected = torch.zeros(decoder.target.backend.vocab_size)
    expected[list(shared)] = (logits[list(shared.values())].float() / HOT).softmax(-1)
    torch.testing.assert_close(draft.probs[0, 0], expected)
    assert len(shared) < decoder.target.backend.vocab_size - 7  # or the test would restrict nothing
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("rule", mostly_exhaustive(["block", "rejection"], "rejection"))
def test_the_distribution_of_the_text_is_the_targets(rule: str) -> None:
    assert distance(make_decoder(rule)) < 0.12


@pytest.mark.exhaustive
def test_a_distribution_that_is_not_renormalized_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, real = make_decoder("rejection"), SharedTokenDrafter.propose

    def halved(self: SharedTokenDrafter, rows: object, lengths: object, sampler: object) -> Draft:
        draft = real(self, rows, lengths, sampler)  # type: ignore[arg-type]
        return draft if draft.probs is None else replace(draft, probs=draft.probs * 0.3)

    monkeypatch.setattr(SharedTokenDrafter, "propose", halved)
    assert distance(decoder) > 0.2


def test_nothing_is_drafted_where_the_options_leave_no_shared_token() -> None:
    decoder = make_decoder("block")
    bridged = decoder._models.bridged
    assert bridged is not None
    bias = {token: float("-inf") for token in bridged.bridge.shared}
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=1, logit_bias=bias)
    result = decoder.generate(PROMPT, params, chat=False)
    assert result.stats.num_draft_tokens == 0 and len(result.token_ids) == 6
    assert not set(result.token_ids) & bridged.bridge.shared.keys()
