"""What a decoder refuses before it decodes, and what its calls give: prompts, parameters and models that do not fit."""

from __future__ import annotations

import pydoc
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from slipstream import Draft, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.config import DecoderConfig
from slipstream.tokenization.vocabulary import differing_tokens
from tests.support.markers import subcases
from tests.support.tiny_models import CHAT_TEMPLATE, fresh, perturbed, prompts, reference, shared, tokenizer

CONTEXT = 32
WORDS = {"<unk>": 0, "the": 1, "heron": 2, "sparrow": 3, "waits": 4}


def tiny(vocab: int = len(WORDS)) -> Any:
    return fresh("llama", vocab_size=vocab, max_position_embeddings=CONTEXT)


def words(vocabulary: dict[str, int]) -> Any:
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@pytest.fixture(scope="module")
def toy() -> SpeculativeDecoder:
    return SpeculativeDecoder("toy")


@pytest.fixture(scope="module")
def bare() -> SpeculativeDecoder:
    """A model without a tokenizer and with a short context."""
    return SpeculativeDecoder(tiny())


def refused(message: str, decoder: SpeculativeDecoder, *arguments: Any) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        decoder.generate(*arguments)
    assert "\n" not in str(refusal.value)


@subcases("prompt", ["", [""], ["a", ""]])
def test_empty_prompt_is_refused(toy: SpeculativeDecoder, prompt: Any) -> None:
    refused(r"^prompt( \d)? is empty; allowed: at least one token$", toy, prompt)


@subcases(
    "prompt",
    [[[]], ["a", []], None, 5, 1.5, {"role": "user"}, b"bytes", [1, "a"], ["a", 1], [1, None], [1.0, 2.0], [True, 1]],
    ids=repr,
)
def test_prompt_of_the_wrong_type_is_refused(toy: SpeculativeDecoder, prompt: Any) -> None:
    refused("^prompt .*; allowed: a text, a list of token ids or a list of chat messages$", toy, prompt)


@subcases("prompt, name, token", [([1, 257], "", 257), ([-1], "", -1), (["a", [3, 999]], " 1", 999)])
def test_token_id_outside_the_vocabulary_is_refused(
    toy: SpeculativeDecoder, prompt: Any, name: str, token: int
) -> None:
    refused(f"^prompt{name}: token id {token}; allowed: 0 to 256$", toy, prompt)


@subcases("length", [CONTEXT, CONTEXT + 1, 500])
def test_prompt_that_fills_the_context_is_refused(bare: SpeculativeDecoder, length: int) -> None:
    refused(f"^prompt has {length} tokens; allowed: at most {CONTEXT - 1}$", bare, [1] * length)


def test_max_tokens_may_fill_the_context_but_not_exceed_it(bare: SpeculativeDecoder) -> None:
    message = rf"^max_tokens=23; allowed: at most 22 after a prompt of 10 tokens \(the model's context is {CONTEXT}\)$"
    refused(message, bare, [1] * 10, SamplingParams(max_tokens=23))
    assert len(bare.generate([1] * 10, SamplingParams(max_tokens=22)).token_ids) == 22
    assert len(bare.generate([1] * 31, SamplingParams(max_tokens=1)).token_ids) == 1


def test_one_bad_prompt_refuses_the_batch_before_anything_is_decoded(bare: SpeculativeDecoder) -> None:
    refused("^prompt 1: token id 5; allowed: 0 to 4$", bare, [[1, 2], [5]], SamplingParams(max_tokens=3))


@subcases("count", [0, 1, 3])
def test_a_list_of_params_must_match_the_number_of_prompts(toy: SpeculativeDecoder, count: int) -> None:
    refused(
        f"^params: {count} given for 2 prompts; allowed: one, or one per prompt$",
        toy,
        ["a", "b"],
        [SamplingParams(max_tokens=1)] * count,
    )


@subcases("params", [{"temperature": 1.0}, 5, "greedy", [None], {}, 0, "", False], ids=repr)
def test_params_of_the_wrong_type_are_refused(toy: SpeculativeDecoder, params: Any) -> None:
    refused("^params: .*; allowed: SamplingParams, or keywords such as max_tokens=10$", toy, "a", params)


@subcases(
    "params, message",
    [
        (SamplingParams(stop="x"), "^stop=.* needs a tokenizer; allowed: stop_token_ids$"),
        (SamplingParams(bad_words=["x"]), "^bad_words: 'x' is text but there is no tokenizer"),
        (SamplingParams(logit_bias={5: 1.0}), "^logit_bias: token id 5; allowed: 0 to 4$"),
        (SamplingParams(stop_token_ids=[99]), "^stop_token_ids: token id 99; allowed: 0 to 4$"),
        (SamplingParams(bad_words=[[1, 7]]), "^bad_words: token id 7; allowed: 0 to 4$"),
    ],
)
def test_option_that_the_model_cannot_serve_is_refused(
    bare: SpeculativeDecoder, params: SamplingParams, message: str
) -> None:
    refused(message, bare, [1, 2], SamplingParams(**{**vars(params), "max_tokens": 2}))


def test_text_without_a_tokenizer_and_chat_without_a_template_are_refused(
    bare: SpeculativeDecoder, toy: SpeculativeDecoder
) -> None:
    # the caller of a loaded model left the tokenizer out; no file is missing
    allowed = r"allowed: tokenizer=AutoTokenizer.from_pretrained\(\.\.\.\), or a list of token ids$"
    refused(f"^prompt is text, but model .* has no tokenizer; {allowed}", bare, "the heron")
    refused("no chat template", toy, [{"role": "user", "content": "hello"}])


@subcases("source", [5, None, "toy:0", "toy:x", "toy:", "./nowhere", "/nowhere.gguf"])
def test_a_source_that_is_not_a_model_is_refused_by_name(source: Any) -> None:
    with pytest.raises(UsageError) as refusal:
        SpeculativeDecoder(source)
    assert str(source) in str(refusal.value) and "allowed" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_draft_model_whose_tokens_have_no_known_bytes_is_refused_naming_both_models() -> None:
    with pytest.raises(UsageError) as refusal:
        SpeculativeDecoder("toy", tiny(), tokenizer=words(WORDS))
    message = str(refusal.value)
    assert message.startswith("draft 'LlamaForCausalLM' has another vocabulary than target 'toy'")
    assert "it has no tokens for 'the end'; allowed: a draft model of the target's vocabulary" in message
    assert "\n" not in message


def test_a_draft_model_of_another_size_is_refused_without_tokenizers_to_compare() -> None:
    with pytest.raises(
        UsageError, match="draft_tokenizer is given, but there is no draft model; allowed: with a draft"
    ):
        SpeculativeDecoder("toy", draft_tokenizer=words(WORDS))
    with pytest.raises(UsageError, match=r"has 7 logits, target .* has 5, and no tokenizers are at hand"):
        SpeculativeDecoder(tiny(), tiny(vocab=7))


def test_a_draft_model_with_a_padded_head_and_the_same_tokenizer_is_allowed() -> None:
    decoder = SpeculativeDecoder(tiny(), tiny(vocab=8), tokenizer=words(WORDS))
    assert decoder.drafter_name == "hybrid"
    params = SamplingParams(max_tokens=6)
    plain = SpeculativeDecoder(tiny(), tokenizer=words(WORDS), drafter="none").generate([1, 2], params)
    assert decoder.generate([1, 2], params).token_ids == plain.token_ids


def test_differing_tokens_are_described_in_the_order_of_the_targets_ids() -> None:
    target = {"a": 0, "b": 1, "c": 2, "d": 3}
    draft = {"a": 0, "b": 2, "c": 1, "e": 4}
    assert differing_tokens(target, target) == []
    assert differing_tokens(target, draft) == [
        "'b' is 1 in the target and 2 in the draft",
        "'c' is 2 in the target and 1 in the draft",
        "'d' is 3 in the target and absent in the draft",
        "'e' is absent in the target and 4 in the draft",
    ]


@pytest.mark.parametrize("name", ["tokenizer", "draft_tokenizer"])
def test_an_object_that_is_not_a_tokenizer_is_refused(name: str) -> None:
    model = fresh("llama")
    for value, shown in (("smollm2", "'smollm2'"), (model, "a LlamaForCausalLM"), (5, "5")):
        with pytest.raises(UsageError, match=f"^{name}={shown}; allowed: a Hugging Face tokenizer, such as Auto"):
            SpeculativeDecoder(model, model, reproducible=False, **{name: value})


def test_a_processor_is_allowed_as_a_tokenizer() -> None:
    processor = SimpleNamespace(tokenizer=tokenizer())
    decoder = SpeculativeDecoder(fresh("llama"), tokenizer=processor, reproducible=False)
    assert decoder.encode("ab", chat=False) == tokenizer()("ab")["input_ids"]


def test_objects_that_are_not_models_are_refused_in_one_line() -> None:
    for source in (tokenizer(), [fresh("llama")], fresh("llama").config):
        with pytest.raises(UsageError, match=r"^model .{1,60} is a \w+.*; allowed: a hub id, a folder, ") as refusal:
            SpeculativeDecoder(source)
        assert "\n" not in str(refusal.value)
        assert ("a tokenizer goes into tokenizer=" in str(refusal.value)) == hasattr(source, "decode")


class CustomOutputLayer(torch.nn.Module):
    """A custom output layer, which does not say how many outputs it has."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return -self.inner(x)


@pytest.mark.parametrize("fast", [False, True])
def test_a_custom_output_layer_works(fast: bool) -> None:
    model = fresh("llama")
    model.lm_head = CustomOutputLayer(model.lm_head)
    decoder = SpeculativeDecoder(model, model, fast=fast, reproducible=False)
    expected = reference(model, [5, 9, 11], 8)
    assert decoder.generate([5, 9, 11], SamplingParams(max_tokens=8)).token_ids == expected


# Kinds of prompts, streams and results

PARAMS = SamplingParams(max_tokens=12)
LETTERS = tokenizer()


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(shared("llama"), tokenizer=LETTERS, num_draft_tokens=4)


def ids(text: str) -> list[int]:
    return LETTERS(text)["input_ids"]


def test_text_chat_and_ids_of_one_prompt_give_the_same_tokens(decoder: SpeculativeDecoder) -> None:
    bare = decoder.generate(ids("hello"), PARAMS)
    assert bare.prompt_token_ids == ids("hello")
    assert decoder.generate("hello", PARAMS, chat=False).token_ids == bare.token_ids
    templated = decoder.generate("hello", PARAMS)
    assert templated.prompt_token_ids == ids("u:hello.a:")
    chat = [{"role": "user", "content": "hello"}]
    assert decoder.generate(chat, PARAMS).token_ids == templated.token_ids
    longer = [*chat, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and"}]
    assert decoder.generate(longer, PARAMS).prompt_token_ids == ids("u:hello.a:yes.u:and.a:")


def test_a_list_of_prompts_gives_a_list_of_results_in_order(decoder: SpeculativeDecoder) -> None:
    mixed: list[Any] = ["hello", ids("abc"), [{"role": "user", "content": "x"}]]
    batch = decoder.generate(mixed, PARAMS)
    assert [r.token_ids for r in batch] == [decoder.generate(prompt, PARAMS).token_ids for prompt in mixed]
    assert isinstance(decoder.generate(["hello"], PARAMS), list)
    by_length = decoder.generate(mixed, [SamplingParams(max_tokens=n) for n in (1, 2, 3)])
    assert [len(r.token_ids) for r in by_length] == [1, 2, 3]


def test_text_is_templated_only_if_the_tokenizer_has_a_template() -> None:
    untemplated = SpeculativeDecoder(shared("llama"), tokenizer=tokenizer(template=None))
    assert untemplated.generate("hello", PARAMS).prompt_token_ids == ids("hello")
    with pytest.raises(UsageError, match="no chat template"):
        untemplated.generate([{"role": "user", "content": "x"}], PARAMS)


@pytest.mark.parametrize("stop", [(), "stop"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_chunks_add_up_to_the_result(drafter: str, stop: Any) -> None:
    draft = perturbed("llama") if drafter == "model" else None
    length = "auto" if drafter == "none" else 4
    made = SpeculativeDecoder(shared("llama"), draft, drafter=drafter, tokenizer=LETTERS, num_draft_tokens=length)
    whole = made.generate("hello", SamplingParams(max_tokens=30)).text
    params = SamplingParams(max_tokens=30, stop=(whole[7:10],) if stop else ())
    result = made.generate("hello", params)
    chunks = list(made.stream("hello", params))
    assert (
        "".join(chunk.text for chunk in chunks) == result.text == (whole[: whole.index(whole[7:10])] if stop else whole)
    )
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert [chunk.origins for chunk in chunks] == [round.origins for round in result.rounds]
    assert chunks[-1].round.finish_reason == result.finish_reason == ("stop" if stop else "length")


def test_a_stream_gives_text_as_it_comes(decoder: SpeculativeDecoder) -> None:
    made, shown = decoder.using("none"), ""
    seen: list[int] = []
    for chunk in made.stream("hello", PARAMS):
        shown += chunk.text
        seen += chunk.token_ids
        # one character per token, so no text is held back
        assert shown == LETTERS.decode(seen, skip_special_tokens=True)
    assert shown == made.generate("hello", PARAMS).text


def test_loaded_models_and_ids_need_no_tokenizer() -> None:
    bare = SpeculativeDecoder(shared("llama"), perturbed("llama"))
    prompt = prompts([6])[0]
    result = bare.generate(prompt, PARAMS)
    assert result.text == "" and len(result.token_ids) == 12
    assert [token for chunk in bare.stream(prompt, PARAMS) for token in chunk.token_ids] == result.token_ids


def test_a_module_that_is_no_language_model_is_refused() -> None:
    with pytest.raises(UsageError, match="Linear; allowed: a Hugging Face PreTrainedModel"):
        SpeculativeDecoder(torch.nn.Linear(2, 2))


def test_a_result_reports_seed_rounds_text_and_losslessness(decoder: SpeculativeDecoder) -> None:
    result = decoder.generate("hello", SamplingParams(temperature=1.0, seed=3, max_tokens=12))
    assert result.seed == 3 and result.stats.lossless and len(result.token_ids) == 12
    assert sum(len(round.tokens) for round in result.rounds) == 12
    assert result.text == LETTERS.decode(result.token_ids, skip_special_tokens=True)
    lossy = SpeculativeDecoder(shared("llama"), acceptance="topk:5").generate([3], PARAMS)
    assert not lossy.stats.lossless


def test_a_drafter_object_is_used_unchanged() -> None:
    class Fives:
        def propose(self, rows: Any, lengths: Any, sampler: Any) -> Draft:
            return Draft.from_lists([[5] * length for length in lengths], sampler.device)

    made = SpeculativeDecoder(shared("llama"), drafter=Fives(), num_draft_tokens=2)
    result = made.generate([3, 4], PARAMS)
    assert made.drafter_name == "Fives" and {token for round in result.rounds for token in round.draft} == {5}
    assert result.token_ids == made.using("none").generate([3, 4], PARAMS).token_ids
    assert CHAT_TEMPLATE not in result.text


def test_fields_of_sampling_params_are_keywords_of_every_call(decoder: SpeculativeDecoder) -> None:
    options: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_tokens": 9, "n": 2}
    expected = decoder.generate("hello", SamplingParams(**options))
    generated = decoder.generate("hello", **options)
    assert [r.token_ids for r in (generated, *generated.alternatives)] == [
        r.token_ids for r in (expected, *expected.alternatives)
    ]
    assert [len(result.token_ids) for result in decoder.generate(["a", "b"], max_tokens=3)] == [3, 3]
    for call in (decoder.generate, decoder.stream, decoder.astream):
        with pytest.raises(UsageError, match=r"^params and max_tokens= are both given; allowed: one of them$"):
            call("hello", PARAMS, max_tokens=3)
        with pytest.raises(UsageError, match=r"^unknown option 'max_token'; .*; did you mean 'max_tokens'\?$"):
            call("hello", max_token=3)  # type: ignore[operator]


def test_no_prompts_give_no_results(decoder: SpeculativeDecoder) -> None:
    assert decoder.generate([]) == decoder.generate((), PARAMS) == decoder.generate([], []) == []
    assert list(decoder.rounds([])) == []


def test_encode_and_decode_mirror_each_other(decoder: SpeculativeDecoder) -> None:
    assert decoder.encode("hello there") == ids("hello there")
    for text in ("hello there", "a", ""):
        assert decoder.decode(decoder.encode(text)) == text
    assert decoder.decode(torch.tensor(ids("abc"))) == decoder.decode(tuple(ids("abc"))) == "abc"  # type: ignore[arg-type]
    templated = decoder.encode("hello", chat=True)
    assert templated == decoder.encode([{"role": "user", "content": "hello"}]) == ids("u:hello.a:")
    assert templated == decoder.generate("hello", PARAMS).prompt_token_ids
    result = decoder.generate("hello", PARAMS)
    assert decoder.decode(result.token_ids) == result.text
    with pytest.raises(UsageError, match="has no tokenizer; allowed: with tokenizer=AutoTokenizer"):
        SpeculativeDecoder(shared("llama")).decode([3])


def test_help_documents_every_field() -> None:
    for cls, settings in ((SamplingParams, SamplingParams), (SpeculativeDecoder, DecoderConfig)):
        shown = " ".join(pydoc.plain(pydoc.render_doc(cls)).replace("|", " ").split())
        for item in fields(settings):
            help_text = " ".join(item.metadata["help"].replace("|", " ").split())
            assert f"{item.name} = " in shown and help_text in shown, item.name
