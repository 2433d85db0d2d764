"""Gemma 4's assistants draft what transformers' do, at one position and without keys, and change no text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.bench.tuning.engine_settings import ENGINE_NAMES
from slipstream.models import quantized_models
from slipstream.models.decoder.planned_model import PlannedModel
from slipstream.models.heads.assistant import AssistantBackend
from slipstream.models.heads.head_files import trained_kind
from slipstream.models.hf.backend import HFBackend
from slipstream.wiring.model_pair import ModelPair
from tests.support.draft_steps import pair_of, same_logits, step_logits
from tests.support.gguf_architectures import CASES, write_case
from tests.support.markers import mostly_exhaustive, needs_avx2, needs_transformers
from tests.support.plain_texts import alone_and_together, drafted_as_plain
from tests.support.tiny_models import VOCAB, WINDOW, fresh, prompts, tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TARGET = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
SMALL = {  # as E2B and E4B: the last layers read keys of others, and each layer has an embedding of its own
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
ASSISTANT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "num_kv_shared_layers": 4,
}
ORDERED = {"use_ordered_embeddings": True, "num_centroids": VOCAB, "centroid_intermediate_top_k": 20}


@dataclass(frozen=True)
class Pair:
    """The folders of a target and its assistant, and transformers' models of them."""

    target: Path
    assistant: Path

    @property
    def models(self) -> tuple[Any, Any]:
        return (
            transformers.AutoModelForCausalLM.from_pretrained(self.target, dtype="auto").eval(),
            transformers.Gemma4AssistantForCausalLM.from_pretrained(self.assistant, dtype="auto").eval(),
        )


def write_pair(
    folder: Path,
    *,
    small: bool = False,
    ordered: bool = False,
    dtype: Any = torch.float32,
    backbone: int = SHAPE["hidden_size"],
    **changes: Any,
) -> Pair:
    """A target and an assistant. backbone: hidden size of the latter's target; changes: of its text configuration."""
    pair = Pair(folder / "target", folder / "assistant")
    config = transformers.Gemma4TextConfig(**SHAPE | TARGET | (SMALL if small else {}))
    text_config = transformers.Gemma4TextConfig(**SHAPE | ASSISTANT | changes)
    assistant_config = transformers.Gemma4AssistantConfig(
        text_config=text_config, backbone_hidden_size=backbone, **ORDERED if ordered else {}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(pair.target)
        assistant = transformers.Gemma4AssistantForCausalLM(assistant_config).to(dtype)
        if ordered:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    assistant.save_pretrained(pair.assistant)
    tokenizer().save_pretrained(pair.target)
    return pair


class Transcription:
    """The drafts of an assistant by transformers' forwards; the target's states are computed again for every text."""

    def __init__(self, pair: Pair) -> None:
        self.target, self.assistant = pair.models

    @torch.inference_mode()
    def logits(
        self, text: Sequence[int], draft: Sequence[int], *, shift: int = 0, moving: int = 0, kept: int = 0
    ) -> Tensor:
        """[K, V] logits for each token of a draft after a text. The options make it wrong, for negative controls.

        shift: takes an earlier hidden state of the target; moving: moves the position with every token; kept: sees keys
        of further tokens that the target has not read.
        """
        read = torch.tensor([list(text)])[:, : len(text) - 1 + kept]
        options = {"output_hidden_states": True, "return_shared_kv_states": True}
        outputs = self.target(input_ids=read, use_cache=False, **options)
        state = outputs.hidden_states[-1][:, [len(text) - 2 - shift]]
        logits = list[Tensor]()
        for step, token in enumerate([text[-1], *draft[:-1]]):
            embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
            scored = self.assistant(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[len(text) - 1 + moving * step]]),
                shared_kv_states=dict(outputs.shared_kv_states),
            )
            logits.append(scored.logits[0, 0])
            state = scored.last_hidden_state
        return torch.stack(logits)


pytestmark = needs_transformers("5.24", "targets that declare whose keys their layers share")

STEPS = 4
FAVORED = {7: 60.0, 9: 60.0}
OPTIONS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 5}}
PROMPTS = prompts([3, 17, 9, 40, 5])
KINDS: dict[str, dict[str, Any]] = {
    "large": {},
    "small": {"small": True, "ordered": True},
    "small, one step": {"small": True},  # its output layer scores all tokens
}
over_kinds = pytest.mark.parametrize("kind", ["large", "small"])


@cache
def written(kind: str) -> Pair:
    return write_pair(Path(mkdtemp()), **KINDS[kind])


@cache
def transcription(kind: str) -> Transcription:
    return Transcription(written(kind))


@cache
def loaded(kind: str) -> ModelPair:
    return pair_of(str(written(kind).target), written(kind).assistant)


def decoder_of(pair: Pair, **settings: Any) -> SpeculativeDecoder:
    defaults: dict[str, Any] = {"drafter": "model", "num_draft_tokens": STEPS, "max_batch_size": 3, "fast": False}
    return SpeculativeDecoder(str(pair.target), str(pair.assistant), **defaults | settings)


def steps_that_agree(kind: str, text: list[int], **wrong: Any) -> list[bool]:
    """For each step, whether the assistant's logits equal those of transformers for the tokens it scores."""
    steps = step_logits(loaded(kind), text, STEPS)
    draft = [int(logits.argmax()) for logits in steps]
    expected = transcription(kind).logits(text, draft, **wrong)
    scored = [logits.isfinite() for logits in steps]
    assert all(int(mask.sum()) == (20 if kind == "small" else len(mask)) for mask in scored)
    return same_logits(
        *([x[mask] for x, mask in zip(logits_of_steps, scored, strict=True)] for logits_of_steps in (steps, expected))
    )


@over_kinds
def test_every_step_is_that_of_transformers(kind: str) -> None:
    for text in prompts([2, 17, 40, 60]):  # some are longer than the window
        assert all(steps_that_agree(kind, text))


@pytest.mark.exhaustive
@over_kinds
@pytest.mark.parametrize(("wrong", "right_steps"), [({"shift": 1}, 0), ({"moving": 1}, 1), ({"kept": 1}, 0)], ids=str)
def test_a_wrong_transcription_is_noticed(kind: str, wrong: dict[str, int], right_steps: int) -> None:
    same = steps_that_agree(kind, prompts([40])[0], **wrong)
    assert same == [True] * right_steps + [False] * (STEPS - right_steps)


@over_kinds
def test_transformers_own_generator_drafts_the_same(kind: str) -> None:
    target, assistant = transcription(kind).target, transcription(kind).assistant
    assistant.generation_config.num_assistant_tokens = STEPS
    for text in prompts([5, 40]):
        ids = torch.tensor([text])
        with torch.inference_mode():
            outputs = target(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
        settings = target.generation_config
        settings.max_length = 100
        generator = SinglePositionMultiTokenCandidateGenerator(assistant, target.get_input_embeddings(), settings)
        candidates, _ = generator.get_candidates(ids, {}, outputs, is_first_iteration=False, n_last_matches=0)
        drafted = [int(logits.argmax()) for logits in step_logits(loaded(kind), text, STEPS)]
        assert candidates[0, len(text) :].tolist() == drafted


def drafts_agree(decoder: SpeculativeDecoder, kind: str) -> bool:
    """Whether the drafts of a batch are those of transformers. Two tokens are favored, so that some are accepted."""
    texts, bias = prompts([3, 17, 9, 40, 5]), torch.zeros(decoder.target.backend.vocab_size)
    bias[list(FAVORED)] = torch.tensor(list(FAVORED.values()))
    params = [SamplingParams(max_tokens=10 + 5 * i, ignore_eos=True, logit_bias=FAVORED) for i in range(len(texts))]
    results, agreements = decoder.generate(texts, params), list[bool]()
    for prompt, result in zip(texts, results, strict=True):
        text = [*prompt, *result.token_ids]
        for round in (round for round in result.rounds if round.draft):
            expected = transcription(kind).logits(text[: round.start], round.draft) + bias
            agreements.append(list(round.draft) == expected.argmax(-1).tolist())
    assert len(agreements) > 10 and sum(result.stats.num_accepted_tokens for result in results) > 5
    return all(agreements)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["large", pytest.param("small, one step", marks=pytest.mark.exhaustive)])
def test_a_batch_drafts_what_transformers_do(kind: str) -> None:
    assert drafts_agree(decoder_of(written(kind)), kind)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["large", "small, one step"])
def test_rows_that_see_one_key_more_than_the_target_has_read_are_noticed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = AssistantBackend._seen
    monkeypatch.setattr(AssistantBackend, "_seen", lambda self, slots, read: seen(self, slots, [n + 1 for n in read]))
    assert not drafts_agree(decoder_of(written(kind)), kind)


def test_hidden_states_of_every_token_are_kept_although_the_model_skips_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept_states(backend: HFBackend) -> Tensor:
        backend.reserve(1, 32)
        backend.keep_hidden_states([backend.num_layers])
        backend.forward(torch.arange(3, 19)[None], [0], first_slot=0, logits=False)
        states = backend.hidden_states([backend.num_layers], 0, 0, 16)
        assert states is not None
        return backend.model.get_decoder().norm(states)

    model = transcription("small").target
    expected = model(torch.arange(3, 19)[None], output_hidden_states=True).hidden_states[-1][0]
    assert (kept_states(HFBackend(model)) - expected).abs().max() < 1e-5 * expected.abs().max()
    backend = HFBackend(model)
    monkeypatch.setattr(backend, "_shares_keys", False)
    assert (kept_states(backend) - expected).abs().max() > 0.1 * expected.abs().max()


def test_a_draft_takes_one_forward_for_each_token_whatever_rows_have_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = AssistantBackend._step, list[int]()

    def counted(self: AssistantBackend, tokens: Tensor, *args: Any) -> Tensor:
        steps.append(len(tokens))
        return step(self, tokens, *args)

    decoder = decoder_of(written("large"))
    monkeypatch.setattr(AssistantBackend, "_step", counted)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logit_bias=FAVORED)
    results = decoder.generate(prompts([3, 17, 9]), params)
    longest = Counter[int]()
    for round in (round for result in results for round in result.rounds):
        longest[round.step] = max(longest[round.step], len(round.draft))
    assert len(steps) == longest.total()


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("drafter", mostly_exhaustive(["model", "auto", "hybrid"], "model", "auto"))
@pytest.mark.parametrize("kind", ["large", "small"])
def test_texts_are_those_of_plain_decoding_alone_and_in_batches(kind: str, drafter: str, options: str) -> None:
    decoder = decoder_of(written(kind), drafter=drafter, num_draft_tokens="auto" if drafter == "auto" else STEPS)
    params = SamplingParams(max_tokens=12, ignore_eos=True, **OPTIONS[options])
    results = alone_and_together(decoder, PROMPTS, params)
    if drafter == "model":
        assert all(result.stats.num_draft_tokens for result in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"fast": True}, id="packed"),
        pytest.param({"fast": "auto", "quantize": "int8"}, marks=pytest.mark.exhaustive, id="int8"),
    ],
)
def test_packed_and_quantized_targets_keep_the_texts_of_plain_decoding(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    decoder = decoder_of(write_pair(tmp_path, ordered=True, dtype=torch.bfloat16), **settings)
    texts, params = prompts([3, 17, 9]), SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=5)
    results = drafted_as_plain(decoder, texts, params)
    assert decoder.target.packed and all(result.stats.num_draft_tokens for result in results)


def test_trees_of_an_assistants_drafts_change_no_text() -> None:
    decoder = decoder_of(written("large"), num_draft_tokens="3x2", reproducible=False)
    texts, params = prompts([3, 17, 9]), SamplingParams(max_tokens=12, ignore_eos=True)
    results = drafted_as_plain(decoder, texts, params)
    assert any(round.parents for result in results for round in result.rounds)


def test_an_assistant_reads_the_keys_and_values_that_a_target_keeps_in_float16() -> None:
    decoder = decoder_of(written("large"), reproducible=False)
    decoder.target.backend.cache.store_as(torch.float16)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logit_bias=FAVORED)
    results = drafted_as_plain(decoder, PROMPTS, params)
    assert sum(result.stats.num_accepted_tokens for result in results) > 5


@pytest.mark.slow
@needs_avx2
@pytest.mark.parametrize("name", ["gemma4", "gemma4-small"])
def test_a_target_in_a_gguf_file_drafts_as_transformers_own_model_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    file, case = tmp_path / "model.gguf", CASES[name]
    config = write_case(file, "gemma4", case, "Q8_0").config
    shared = ("vocab_size", "num_attention_heads", "head_dim", "sliding_window", "rope_parameters")
    sizes = {key: getattr(config, key) for key in shared} | {"global_head_dim": case.settings["global_head_dim"]}
    write_pair(tmp_path / "pair", backbone=config.hidden_size, **sizes)
    drafted = []
    for is_planned in (True, False):
        if not is_planned:
            monkeypatch.setattr(quantized_models, "planned_model", lambda settings: None)
        decoder = decoder_of(Pair(file, tmp_path / "pair" / "assistant"), fast="auto", reproducible=False)
        assert isinstance(decoder.target.model, PlannedModel) == is_planned
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        results = drafted_as_plain(decoder, [[5, 9, 70, 71], [100, 7, 33]], params)
        drafted.append([[round.draft for round in result.rounds] for result in results])
    assert drafted[0] == drafted[1] and any(any(drafts) for drafts in drafted[0])


def test_targets_whose_last_layers_share_keys_run_on_the_slot_cache() -> None:
    decoder = decoder_of(written("small"))
    assert isinstance(decoder.target.backend, HFBackend)
    with pytest.raises(SlipstreamError, match="some layers read keys and values of others"):
        decoder.using("layer_skip:2")


@pytest.mark.slow
def test_loaded_models_draft_as_their_files_do() -> None:
    target, assistant = written("large").models
    decoder = SpeculativeDecoder(target, assistant, drafter="model", num_draft_tokens=STEPS, fast=False)
    prompt, params = prompts([17])[0], SamplingParams(max_tokens=12, ignore_eos=True)
    drafts, expected = (
        [round.draft for round in drafting.generate(prompt, params).rounds]
        for drafting in (decoder, decoder_of(written("large")))
    )
    assert drafts == expected and any(drafts)
    with pytest.raises(SlipstreamError, match=r"is of torch.bfloat16 on cpu; allowed: torch.float32 on cpu"):
        SpeculativeDecoder(target, assistant.to(torch.bfloat16), drafter="model")


def test_assistants_are_recognized_by_their_configuration() -> None:
    kind = trained_kind(str(written("large").assistant))
    assert kind == "assistant" and ENGINE_NAMES[kind] == ("mtp", "FROZEN_KV_MTP", "draft-mtp")


def test_a_target_of_another_kind_is_refused_in_one_line(tmp_path: Path) -> None:
    head, file = str(written("large").assistant), tmp_path / "model.gguf"
    write_case(file, "llama", CASES["llama"], "Q8_0")
    for target in (fresh("llama"), str(file)):
        message = r"has type 'llama' of transformers 5.*; allowed: a Gemma 4 model of"
        with pytest.raises(SlipstreamError, match=message) as raised:
            SpeculativeDecoder(target, head, drafter="model")
        assert "\n" not in str(raised.value)
    with pytest.raises(SlipstreamError, match="'toy', whose hidden states cannot be read"):
        SpeculativeDecoder("toy", head, drafter="model")
    with pytest.raises(SlipstreamError, match=r"draft_dtype='float16', .* has its target's type; allowed: 'float32', "):
        decoder_of(written("large"), draft_dtype="float16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_head_dim": 32}, "its head_dim of full_attention is 32, that of"),
        ({"num_key_value_heads": 4}, "its num_key_value_heads of sliding_attention is 4, that of"),
        ({"vocab_size": 40}, "its vocab_size is 40, that of"),
    ],
    ids=str,
)
def test_an_assistant_of_another_target_is_refused_with_both_sizes(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    pair = write_pair(tmp_path, **changes)
    with pytest.raises(SlipstreamError, match=message):
        decoder_of(pair)


def test_files_that_are_no_assistants_are_refused(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    file = pair.assistant / "config.json"
    settings = json.loads(file.read_text())
    for change, message in (
        ({"backbone_hidden_size": 48}, "its backbone_hidden_size is 48, that of .* 32"),
        ({"use_ordered_embeddings": True, "num_centroids": 61}, "2 tensors do not fit its config.json, first 'masked"),
    ):
        file.write_text(json.dumps(settings | change))
        with pytest.raises(SlipstreamError, match=message):
            decoder_of(pair)
    (pair.assistant / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(SlipstreamError, match="could not be read"):
        decoder_of(pair)
