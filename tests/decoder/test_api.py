"""The public face: names, signatures, kinds of prompts, streams, refusals."""

import inspect
from typing import Any

import pytest
import torch

import slipstream
from slipstream import Draft, SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError
from tests.support.tiny_models import CHAT_TEMPLATE, perturbed, prompts, shared, tokenizer

PARAMS = SamplingParams(max_tokens=12)
WORDS = tokenizer()


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(shared("llama"), tokenizer=WORDS, num_draft_tokens=4)


def ids(text: str) -> list[int]:
    return WORDS(text)["input_ids"]


def test_public_names() -> None:
    names = "Chunk Draft Drafter Policy Result Round Row SamplingParams SlipstreamError SpeculativeDecoder Stats "
    assert set(slipstream.__all__) >= set((names + "UsageError Verdict __version__").split())
    assert all(hasattr(slipstream, name) for name in slipstream.__all__)


def test_the_constructor_takes_what_the_design_says() -> None:
    signature = inspect.signature(SpeculativeDecoder.__init__)
    found = [(p.name, p.kind.name, p.default) for p in signature.parameters.values()][1:]
    keywords = {
        "tokenizer": None,
        "draft_tokenizer": None,
        "drafter": "auto",
        "num_draft_tokens": "auto",
        "acceptance": "auto",
        "dtype": "auto",
        "draft_dtype": "auto",
        "activations": "auto",
        "quantize": "none",
        "draft_vocabulary": "auto",
        "draft_context": "auto",
        "device": "auto",
        "fast": "auto",
        "reproducible": "auto",
        "max_batch_size": 8,
        "load_options": None,
    }
    assert found == [
        ("target", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("draft", "POSITIONAL_OR_KEYWORD", None),
        *((name, "KEYWORD_ONLY", default) for name, default in keywords.items()),
    ]


def test_every_kind_of_prompt_stands_for_its_ids(decoder: SpeculativeDecoder) -> None:
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
    own = decoder.generate(mixed, [SamplingParams(max_tokens=n) for n in (1, 2, 3)])
    assert [len(r.token_ids) for r in own] == [1, 2, 3]


def test_a_template_is_used_only_where_there_is_one() -> None:
    untemplated = SpeculativeDecoder(shared("llama"), tokenizer=tokenizer(template=None))
    assert untemplated.generate("hello", PARAMS).prompt_token_ids == ids("hello")
    with pytest.raises(UsageError, match="no chat template"):
        untemplated.generate([{"role": "user", "content": "x"}], PARAMS)


@pytest.mark.parametrize("stop", [(), "stop"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_chunks_add_up_to_the_result(drafter: str, stop: Any) -> None:
    draft = perturbed("llama") if drafter == "model" else None
    length = "auto" if drafter == "none" else 4
    made = SpeculativeDecoder(shared("llama"), draft, drafter=drafter, tokenizer=WORDS, num_draft_tokens=length)
    whole = made.generate("hello", SamplingParams(max_tokens=30)).text
    params = SamplingParams(max_tokens=30, stop=(whole[7:10],) if stop else ())
    result = made.generate("hello", params)
    chunks = list(made.stream("hello", params))
    assert (
        "".join(chunk.text for chunk in chunks) == result.text == (whole[: whole.index(whole[7:10])] if stop else whole)
    )
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert [chunk.origins for chunk in chunks] == [done.origins for done in result.rounds]
    assert chunks[-1].round.finish_reason == result.finish_reason == ("stop" if stop else "length")


def test_a_stream_gives_text_as_it_comes(decoder: SpeculativeDecoder) -> None:
    made, shown = decoder.using("none"), ""
    seen: list[int] = []
    for chunk in made.stream("hello", PARAMS):
        shown += chunk.text
        seen += chunk.token_ids
        assert shown == WORDS.decode(seen, skip_special_tokens=True)  # one character per token: nothing to wait for
    assert shown == made.generate("hello", PARAMS).text


def test_loaded_models_and_ids_need_no_tokenizer() -> None:
    bare = SpeculativeDecoder(shared("llama"), perturbed("llama"))
    prompt = prompts([6])[0]
    result = bare.generate(prompt, PARAMS)
    assert result.text == "" and len(result.token_ids) == 12
    assert [token for chunk in bare.stream(prompt, PARAMS) for token in chunk.token_ids] == result.token_ids
    for refused in ("text", [{"role": "user", "content": "x"}]):
        with pytest.raises(UsageError, match="no tokenizer"):
            bare.generate(refused, PARAMS)
    with pytest.raises(UsageError, match=r"stop=.* needs a tokenizer"):
        bare.generate(prompt, SamplingParams(stop="x"))
    with pytest.raises(UsageError, match=r"bad_words.* no tokenizer"):
        bare.generate(prompt, SamplingParams(bad_words=["x"]))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match="gamma"):
        SpeculativeDecoder(shared("llama"), gamma=4)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="'gamma'; allowed: temperature"):
        SamplingParams(gamma=4)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="int; allowed"):
        SpeculativeDecoder(3)
    with pytest.raises(UsageError, match="Linear; allowed: a Hugging Face PreTrainedModel"):
        SpeculativeDecoder(torch.nn.Linear(2, 2))
    assert issubclass(UsageError, SlipstreamError) and issubclass(UsageError, ValueError)


def test_the_result_reports_what_happened(decoder: SpeculativeDecoder) -> None:
    result = decoder.generate("hello", SamplingParams(temperature=1.0, seed=3, max_tokens=12))
    assert result.seed == 3 and result.stats.lossless and len(result.token_ids) == 12
    assert sum(len(done.tokens) for done in result.rounds) == 12
    assert result.text == WORDS.decode(result.token_ids, skip_special_tokens=True)
    lossy = SpeculativeDecoder(shared("llama"), acceptance="topk:5").generate([3], PARAMS)
    assert not lossy.stats.lossless


def test_a_drafter_object_is_used_as_it_is() -> None:
    class Fives:
        def propose(self, rows: Any, lengths: Any, sampler: Any) -> Draft:
            return Draft.from_lists([[5] * length for length in lengths], sampler.device)

    made = SpeculativeDecoder(shared("llama"), drafter=Fives(), num_draft_tokens=2)
    result = made.generate([3, 4], PARAMS)
    assert made.drafter_name == "Fives" and {token for done in result.rounds for token in done.draft} == {5}
    assert result.token_ids == made.using("none").generate([3, 4], PARAMS).token_ids
    assert CHAT_TEMPLATE not in result.text
