"""`generate` returns the same text with our loop as without it; options our loop cannot honor are refused."""

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria, StopStringCriteria, TextStreamer
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from slipstream import SlipstreamError, UsageError
from slipstream.integrations.transformers.custom_generate import CustomGenerate, custom_generate
from slipstream.integrations.transformers.generate_options import _warn_once
from slipstream.models.hf.prepared_inputs import cache_name
from tests.support.hf_cases import COUNT, ENDS, GREEDY, WIDTH, batch, both, drafting, expected
from tests.support.markers import needs_transformers, subcases
from tests.support.tiny_models import VOCAB, fresh, perturbed, shared, tokenizer
from tests.support.vocabularies import speaking
from tests.support.vocabularies import tokenizer as tokenizer_of

pytestmark = pytest.mark.usefixtures("cache_audit")


@pytest.mark.each_value
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma3"])
def test_greedy_text_of_a_padded_batch_is_that_of_generate(name: str, drafter: str) -> None:
    ours = shared(name).generate(
        **batch(), **GREEDY, eos_token_id=ENDS, custom_generate=custom_generate, **drafting(name, drafter)
    )
    assert torch.equal(ours, expected(name))


def test_some_rows_of_the_test_batches_end_before_others() -> None:
    padded = [(expected(name)[:, WIDTH:] == 0).any(1) for name in ("llama", "qwen2", "gpt2", "gemma3")]
    assert any(rows.any() and not rows.all() for rows in padded)


@pytest.mark.slow
def test_a_draft_model_of_another_vocabulary_needs_both_tokenizers() -> None:
    target, draft = speaking("bytes"), speaking("sentencepiece", 1)
    ids = torch.tensor([tokenizer_of("bytes")("The heron was slow")["input_ids"]] * 2)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    spoken = CustomGenerate(tokenizer=tokenizer_of("bytes"), drafter="model", num_draft_tokens=3)
    drafted = target.generate(
        ids,
        **options,
        custom_generate=spoken,
        draft=draft,
        draft_tokenizer=tokenizer_of("sentencepiece"),
        return_dict_in_generate=True,
    )
    assert torch.equal(drafted.sequences, plain) and drafted.slipstream_stats.num_draft_tokens > 0
    spoken = replace(spoken, draft_tokenizer=tokenizer_of("sentencepiece"))  # only in calls that have a draft model
    assert torch.equal(target.generate(ids, **options, custom_generate=spoken, drafter="none"), plain)
    with pytest.raises(
        UsageError, match=r"no tokenizers are at hand.*tokenizer= and draft_tokenizer= of .*CustomGenerate"
    ):
        target.generate(ids, **options, custom_generate=CustomGenerate(drafter="model"), draft=draft)
    as_transformers_says_it = target.generate(
        ids,
        **options,
        custom_generate=CustomGenerate(drafter="model", num_draft_tokens=3),
        assistant_model=draft,
        tokenizer=tokenizer_of("bytes"),
        assistant_tokenizer=tokenizer_of("sentencepiece"),
        return_dict_in_generate=True,
    )
    assert torch.equal(as_transformers_says_it.sequences, plain)
    assert as_transformers_says_it.slipstream_stats.num_draft_tokens > 0


def test_a_lossy_rule_does_not_give_the_text_of_generate() -> None:
    ours = shared("llama").generate(
        **batch(),
        **GREEDY,
        eos_token_id=ENDS,
        custom_generate=custom_generate,
        draft=perturbed("llama"),
        acceptance="topk:20",
    )
    assert not torch.equal(ours, expected("llama"))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 3])
def test_more_rows_than_the_batch_size_give_the_text_of_generate(limit: int) -> None:
    for made in (
        CustomGenerate(draft=perturbed("gemma3"), max_batch_size=limit),
        partial(custom_generate, draft=perturbed("gemma3"), max_batch_size=limit),
    ):
        ours = shared("gemma3").generate(**batch(), **GREEDY, eos_token_id=ENDS, custom_generate=made)
        assert torch.equal(ours, expected("gemma3"))


@pytest.mark.slow
def test_sampling_follows_the_global_seed_and_greedy_decoding_leaves_it_alone() -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        settings = GREEDY | {"do_sample": True, "num_return_sequences": 2}
        return shared("llama").generate(**batch(), **settings, custom_generate=custom_generate)

    first = draw(1)
    assert first.shape[0] == 8 and not torch.equal(first[0], first[1])
    assert torch.equal(first, draw(1)) and not torch.equal(first, draw(2))
    state = torch.get_rng_state()
    both({})
    assert torch.equal(state, torch.get_rng_state())


class EndsAfter(StoppingCriteria):
    """Ends a row after one of these tokens, from the third on."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.tokens) & (input_ids.shape[1] >= WIDTH + 3)


@pytest.mark.parametrize("ends", [ENDS, None])
@pytest.mark.parametrize("option", [{}, {"min_new_tokens": 9}])
def test_criteria_end_rows_as_in_generate(ends: list[int] | None, option: dict[str, Any]) -> None:
    """Without end tokens, `generate` continues stopped rows; a minimum length does not hold back criteria."""
    full = expected("llama")[:, WIDTH:]
    stops = EndsAfter(full[:, 4].tolist())
    ours, plain = both({"eos_token_id": ends, "stopping_criteria": [stops]} | option)
    assert torch.equal(ours, plain)
    assert plain.shape != expected("llama").shape or not torch.equal(plain, expected("llama"))


@pytest.mark.slow
def test_stop_strings_stay_in_the_text() -> None:
    spoken = tokenizer()
    piece = spoken.decode(expected("llama")[0, WIDTH + 3 : WIDTH + 5])
    options = GREEDY | {"eos_token_id": ENDS}
    plain = shared("llama").generate(**batch(), **options, stop_strings=[piece], tokenizer=spoken)
    assert not torch.equal(plain, expected("llama"))
    drafted = drafting("llama", "model")
    with_tokenizer = CustomGenerate(tokenizer=spoken, **drafted)
    ours = shared("llama").generate(**batch(), **options, stop_strings=[piece], custom_generate=with_tokenizer)
    assert torch.equal(ours, plain)
    criteria = [StopStringCriteria(spoken, [piece])]
    ours = shared("llama").generate(
        **batch(), **options, stopping_criteria=criteria, custom_generate=custom_generate, **drafted
    )
    assert torch.equal(ours, plain)
    stopping = {"stop_strings": [piece], "tokenizer": spoken, "custom_generate": custom_generate}
    assert torch.equal(shared("llama").generate(**batch(), **options, **stopping), plain)
    with pytest.raises(UsageError, match=r"stop_strings=.* without a tokenizer; allowed: .*CustomGenerate\(tokenizer="):
        shared("llama").generate(**batch(), **options, stop_strings=[piece], custom_generate=custom_generate)


def test_max_time_ends_every_row() -> None:
    out = shared("llama").generate(
        **batch(), **GREEDY | {"max_new_tokens": 900}, max_time=0.05, custom_generate=custom_generate
    )
    assert WIDTH < out.shape[1] < WIDTH + 900


def test_a_stopping_criterion_must_give_one_answer_per_row() -> None:
    class Fixed(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.zeros(4, dtype=torch.bool)

    with pytest.raises(UsageError, match="Fixed returned 4 answers"):
        shared("llama").generate(**batch(), **GREEDY, stopping_criteria=[Fixed()], custom_generate=custom_generate)


class Recorder(BaseStreamer):
    """A streamer that records its calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.told.append(value.tolist())

    def end(self) -> None:
        self.told.append("end")


def test_a_streamer_gets_what_generate_gives_it() -> None:
    single_row = {name: value[3:] for name, value in batch().items()}
    plain, ours = Recorder(), Recorder()
    shared("llama").generate(**single_row, **GREEDY, streamer=plain)
    shared("llama").generate(
        **single_row, **GREEDY, streamer=ours, custom_generate=custom_generate, **drafting("llama", "model")
    )
    assert ours.told == plain.told and ours.told[-1] == "end" and len(ours.told) == COUNT + 2


def test_a_streamer_with_several_rows_is_refused() -> None:
    with pytest.raises(UsageError, match="streamer"):
        shared("llama").generate(**batch(), **GREEDY, streamer=Recorder(), custom_generate=custom_generate)
    with pytest.raises(ValueError, match="batch size 1"):  # transformers itself warns about this
        shared("llama").generate(
            **batch(), **GREEDY, streamer=TextStreamer(tokenizer()), custom_generate=custom_generate
        )


def test_the_output_object_has_sequences_results_and_statistics() -> None:
    out = shared("gemma3").generate(
        **batch(),
        **GREEDY,
        eos_token_id=ENDS,
        return_dict_in_generate=True,
        custom_generate=custom_generate,
        assistant_model=perturbed("gemma3"),
    )
    assert isinstance(out, GenerateDecoderOnlyOutput) and torch.equal(out.sequences, expected("gemma3"))
    assert out.scores is None and getattr(out, CACHE) is None
    stats, texts = out.slipstream_stats, [result.token_ids for result in out.slipstream_results]
    assert stats.num_accepted_tokens > 0 and stats.num_output_tokens == sum(map(len, texts))
    for row, text in zip(out.sequences[:, WIDTH:].tolist(), texts, strict=True):
        assert row[: len(text)] == text and not any(row[len(text) :])


CACHE = cache_name(shared("llama")) or ""  # the name of the option in the installed transformers
IDS = batch()["input_ids"]
LOGPROBS = r"allowed: None, False, logprobs=\.\.\. of SpeculativeDecoder.generate, or a call without custom_generate$"
REFUSALS: dict[str, dict[str, Any]] = {
    "num_beams=2 .*; allowed: None, 1, or a call without custom_generate$": {"num_beams": 2},
    f"output_scores.*; {LOGPROBS}": {"output_scores": True, "return_dict_in_generate": True},
    f"output_logits.*; {LOGPROBS}": {"output_logits": True, "return_dict_in_generate": True},
    "output_attentions.*; allowed: None, False, or a call without custom_generate$": {
        "output_attentions": True,
        "return_dict_in_generate": True,
    },
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "guidance_scale": {"guidance_scale": 1.5},
    "penalty_alpha": {"penalty_alpha": 0.5, "top_k": 4},
    "inputs_embeds": {"inputs_embeds": torch.zeros(4, WIDTH, 32)},
    "synced_gpus": {"synced_gpus": True},
    "position_ids": {"position_ids": torch.arange(WIDTH).expand(4, -1)},
    "row 0 is not padding": {"attention_mask": torch.ones_like(IDS).index_fill(1, torch.tensor([5]), 0)},
    "row 1 is not padding": {"attention_mask": torch.tensor([[1], [0], [1], [1]]).expand(-1, WIDTH)},
    "allowed: padding on the left": {"attention_mask": torch.ones_like(IDS).index_fill(1, torch.tensor([19]), 0)},
    "at most 1024": {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 1005},
    "assistant_tokenizer are both": {"assistant_tokenizer": tokenizer(), "draft_tokenizer": tokenizer()},
    r"draft_tokenizer \(assistant_tokenizer\) without a draft model": {"assistant_tokenizer": tokenizer()},
    "assistant_model are both": {"assistant_model": shared("llama"), "draft": shared("llama")},
    "drafter='nothing'": {"drafter": "nothing"},
    "num_draft_tokens": {"num_draft_tokens": -1},
    "acceptance": {"acceptance": "yes"},
    "max_batch_size": {"max_batch_size": 0},
    "needs a draft model": {"drafter": "model"},
}


@subcases("message", REFUSALS)
def test_options_that_cannot_be_honored_are_refused_by_name(message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        shared("llama").generate(**batch() | GREEDY | REFUSALS[message], custom_generate=custom_generate)
    assert "\n" not in str(error.value)


def test_options_of_assisted_generation_are_named_once_as_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()
    options = batch((9,)) | GREEDY | {"custom_generate": custom_generate}
    plain = shared("llama").generate(**options)
    assert caplog.text == ""
    for _ in range(2):
        looked_up = shared("llama").generate(**options, prompt_lookup_num_tokens=7)
        assert torch.equal(plain, looked_up)
    assert [record.getMessage() for record in caplog.records] == [
        "prompt_lookup_num_tokens=7 has no effect with slipstream.custom_generate, which takes drafter='ngram', "
        "num_draft_tokens=..."
    ]
    shared("llama").generate(**options, draft=perturbed("llama"), num_assistant_tokens=5)
    assert caplog.records[-1].getMessage().startswith("num_assistant_tokens=5 has no effect")


def test_a_draft_model_drafts_for_several_sequences_of_a_prompt() -> None:
    options = batch() | GREEDY | {"do_sample": True, "num_return_sequences": 2, "custom_generate": custom_generate}
    torch.manual_seed(3)
    plain = shared("llama").generate(**options, drafter="none")
    torch.manual_seed(3)
    assert torch.equal(shared("llama").generate(**options, draft=perturbed("llama")), plain) and len(plain) == 8


def test_a_processor_with_state_is_refused_by_name() -> None:
    class Counting(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return scores + self.calls * torch.arange(VOCAB)

    with pytest.raises(UsageError, match="Counting keeps state"):
        shared("llama").generate(**batch(), **GREEDY, logits_processor=[Counting()], custom_generate=custom_generate)


def test_a_model_in_training_mode_is_refused_and_stays_in_it() -> None:
    model = fresh("llama").train()
    with pytest.raises(UsageError, match="training mode"):
        model.generate(**batch(), **GREEDY, custom_generate=custom_generate)
    assert model.training


@pytest.mark.slow
def test_decoders_live_as_long_as_their_models() -> None:
    made, model, draft = CustomGenerate(), fresh("llama"), fresh("llama", 1)
    model.generate(**batch(), **GREEDY, custom_generate=made, draft=draft)
    decoder = CustomGenerate(draft=draft).decoder_of(model)
    model.generate(**batch(), **GREEDY, custom_generate=made, draft=draft, drafter="ngram", num_draft_tokens=2)
    assert CustomGenerate(draft=draft).decoder_of(model) is decoder
    assert CustomGenerate(draft=draft, max_batch_size=2).decoder_of(model) is not decoder
    del decoder
    gone = [weakref.ref(draft), weakref.ref(model)]
    CustomGenerate().decoder_of(model)  # without a draft model
    del draft
    gc.collect()
    assert gone[0]() is None and gone[1]() is model
    del model
    gc.collect()
    assert gone[1]() is None


@pytest.mark.slow
def test_changed_weights_and_dtypes_take_effect_in_the_next_call() -> None:
    model = fresh("llama")
    before = model.generate(**batch(), **GREEDY, custom_generate=custom_generate)
    model.load_state_dict(fresh("llama", 5).state_dict())
    after = model.generate(**batch(), **GREEDY, custom_generate=custom_generate)
    assert torch.equal(after, model.generate(**batch(), **GREEDY)) and not torch.equal(before, after)
    model.double()  # another precision needs another decoder
    assert torch.equal(after, model.generate(**batch(), **GREEDY, custom_generate=custom_generate))


def test_a_failed_call_does_not_affect_the_next_one() -> None:
    def fails(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, float("-inf"))

    with pytest.raises(SlipstreamError, match="no token to choose"):
        shared("llama").generate(**batch(), **GREEDY, logits_processor=[fails], custom_generate=custom_generate)
    ours, plain = both({})
    assert torch.equal(ours, plain)


@pytest.mark.filterwarnings("ignore:.*past_key_values")  # transformers calls it cache from 5.24 on
@pytest.mark.parametrize(
    "name", ["past_key_values", pytest.param("cache", marks=needs_transformers("5.24", "this name of the argument"))]
)
def test_a_cache_is_refused_under_either_of_its_names(name: str) -> None:
    options = {name: DynamicCache(), "custom_generate": custom_generate}
    with pytest.raises(UsageError, match=r"^past_key_values \(cache\) is given; allowed: input_ids and attention_mask"):
        shared("llama").generate(torch.tensor([[5, 9, 11]]), max_new_tokens=4, pad_token_id=0, **options)
