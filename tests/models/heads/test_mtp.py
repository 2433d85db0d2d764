"""Multi-token-prediction layers of a target's checkpoint draft what a transcription drafts, and change no text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.core.session import Session
from slipstream.models.cpu.quantized_linear import QuantizedLinear
from slipstream.models.decoder.planned_model import PlannedModel
from slipstream.models.heads.head_backend import HeadSession
from slipstream.models.weights.mtp_tensors import mtp_layers, of_another_form
from tests.support.gguf_architectures import CASES, write_case
from tests.support.markers import mostly_exhaustive, needs_avx2, needs_transformers
from tests.support.mtp_cases import LAYOUTS, Transcription, Written, write_copying_target, write_target
from tests.support.plain_texts import alone_and_together, drafted_as_plain
from tests.support.tiny_models import fast, prompts

pytestmark = pytest.mark.slow

COUNT, STEPS = 12, 3
OPTIONS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 5}}
CLOSE = dict.fromkeys(LAYOUTS, 1e-5) | {"qwen3_5": 1e-4}  # transformers sums recurrences in another order
PROMPTS = prompts([3, 17, 40, 5])
over_layouts = pytest.mark.parametrize("kind", LAYOUTS)
COUNTS = [*((kind, 1) for kind in LAYOUTS), ("deepseek_v3", 3)]
over_counts = pytest.mark.parametrize(("kind", "count"), COUNTS)


@cache
def written(kind: str, count: int = 1) -> Written:
    return write_target(Path(mkdtemp()), kind, count=count)


@cache
def transcription(kind: str, count: int = 1) -> Transcription:
    return Transcription(written(kind, count))


def decoder_of(target: Written, **settings: Any) -> SpeculativeDecoder:
    defaults: dict[str, Any] = {
        "drafter": "model",
        "num_draft_tokens": STEPS,
        "max_batch_size": 3,
        "fast": False,
    } | settings
    return SpeculativeDecoder(str(target.folder), **defaults)


@dataclass(frozen=True)
class Drafted:
    """A draft after a text: its tokens, and the logits [drafted, V] that they were chosen from."""

    text: list[int]
    draft: list[int]
    logits: Tensor

    def gap(self, expected: Transcription, **wrong: Any) -> float:
        """The largest difference from a transcription's logits, as a share of the largest logit."""
        logits = expected.logits(self.text, self.draft, **wrong)
        return float((self.logits - logits).abs().max() / logits.abs().max())


def drafts(decoder: SpeculativeDecoder, prompt: list[int], **options: Any) -> list[Drafted]:
    """The draft of each round of a text that drafts."""
    assert decoder.draft is not None
    backend: Any = decoder.draft.backend
    forward, logits_seen = backend.forward, list[Tensor]()

    def record(tokens: Tensor, starts: list[int], **options_of_forward: Any) -> Tensor:
        logits: Tensor = forward(tokens, starts, **options_of_forward)
        if options_of_forward["logits"]:
            logits_seen.append(logits[0, -1])
        return logits

    backend.forward = record
    result = decoder.generate(prompt, SamplingParams(max_tokens=COUNT, ignore_eos=True, **options))
    text = [*prompt, *result.token_ids]
    pairs = [(text[: round.start], list(round.draft)) for round in result.rounds if round.draft]
    assert len(pairs) > 3 and len(logits_seen) == sum(len(draft) for _, draft in pairs)
    return [Drafted(before, draft, torch.stack([logits_seen.pop(0) for _ in draft])) for before, draft in pairs]


@over_counts
def test_every_draft_is_that_of_the_transcription(kind: str, count: int) -> None:
    for drafted in drafts(decoder_of(written(kind, count)), prompts([17])[0]):
        assert drafted.gap(transcription(kind, count)) < CLOSE[kind]
        assert drafted.draft == drafted.logits.argmax(-1).tolist()


@pytest.mark.exhaustive
@pytest.mark.each_value
@over_layouts
@pytest.mark.parametrize("wrong", [{"shift": 1}, {"swapped": True}], ids=["shift", "order"])
def test_a_wrong_transcription_is_noticed(kind: str, wrong: dict[str, Any]) -> None:
    for drafted in drafts(decoder_of(written(kind)), prompts([17])[0]):
        assert drafted.gap(transcription(kind), **wrong) > 0.01


@pytest.mark.parametrize(
    ("kind", "count"), mostly_exhaustive([("qwen3_5", 1), ("glm4_moe", 1), ("deepseek_v3", 3)], ("deepseek_v3", 3))
)
def test_rows_from_the_layers_own_outputs_are_computed_again(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tokens are favored, so that drafts are accepted. Negative control: if rows are kept, drafts differ."""
    favored = dict.fromkeys((7, 9, 21), 30.0)

    def largest() -> float:
        all_drafts = drafts(decoder_of(written(kind, count)), prompts([17])[0], logit_bias=favored)
        assert any(
            len(later.text) - len(earlier.text) > 1 for earlier, later in pairwise(all_drafts)
        )  # some draft was accepted
        return max(drafted.gap(transcription(kind, count)) for drafted in all_drafts)

    assert largest() < CLOSE[kind]
    monkeypatch.setattr(HeadSession, "keep_drafts", Session.keep_drafts)
    monkeypatch.setattr(HeadSession, "_drop_wrong", lambda self: None)
    assert largest() > 0.01


@needs_transformers("5.18", "its layers without a mask")
@pytest.mark.parametrize("kind", mostly_exhaustive(["deepseek_v3", "glm4_moe"], "deepseek_v3"))
@pytest.mark.parametrize("count", [1, 3])
def test_transformers_own_generator_drafts_the_same(kind: str, count: int) -> None:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    target = written(kind, count)
    model = transformers.AutoModelForCausalLM.from_pretrained(target.folder, dtype="auto").eval()
    model.config.num_mtp_layers = count
    # transformers expects the layer numbers of published models
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.[{model.config.num_hidden_layers}-9]\."]
    layers = MtpModel.from_pretrained(model)
    for drafted in drafts(decoder_of(target, num_draft_tokens=count), prompts([17])[0]):
        ids = torch.tensor([drafted.text])
        states = model(input_ids=ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, ids.shape[1])[None]
        inputs = {"attention_mask": None, "position_ids": positions}
        _, logits, _ = layers(ids[:, 1:], states, mtp_cache=MtpCache(config=model.config.get_mtp_config()), **inputs)
        logits = logits[0, : len(drafted.draft)]
        assert (drafted.logits - logits).abs().max() < 1e-5 * logits.abs().max()


@pytest.mark.each_value
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("drafter", ["model", "auto", "hybrid"])
@pytest.mark.parametrize("kind", mostly_exhaustive(LAYOUTS, "deepseek_v3", "qwen3_5", "mellum"))
def test_texts_are_those_of_plain_decoding_alone_and_in_batches(kind: str, drafter: str, options: str) -> None:
    decoder = decoder_of(written(kind), drafter=drafter, num_draft_tokens="auto" if drafter == "auto" else STEPS)
    assert decoder.draft is not None and decoder.draft.name == "mtp"
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, **OPTIONS[options])
    results = alone_and_together(decoder, PROMPTS, params)
    if drafter == "model":
        assert all(result.stats.num_draft_tokens for result in results)


@pytest.mark.parametrize(("kind", "count"), mostly_exhaustive([("mellum", 1), ("deepseek_v3", 3)], ("deepseek_v3", 3)))
def test_a_batch_drafts_what_each_row_drafts_alone(kind: str, count: int) -> None:
    """Rows that enter, leave and move to other slots keep their hidden states."""
    texts = prompts([3, 17, 9, 40, 5, 30])
    params = [SamplingParams(max_tokens=8 + 5 * i, ignore_eos=True) for i in range(len(texts))]
    results = decoder_of(written(kind, count)).generate(texts, params)
    for prompt, result in zip(texts, results, strict=True):
        text = [*prompt, *result.token_ids]
        for round in result.rounds:
            if draft := list(round.draft):
                assert draft == transcription(kind, count).logits(text[: round.start], draft).argmax(-1).tolist()


def test_trees_of_mtp_drafts_change_no_text(tmp_path: Path) -> None:
    target, settings = write_target(tmp_path, "mimo", dtype=torch.bfloat16, head_dim=64), FAST["packed"]
    decoder = decoder_of(target, num_draft_tokens="3x2", **settings)
    texts, params = prompts([3, 17, 9]), SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.8, seed=5)
    results = drafted_as_plain(decoder, texts, params)
    assert any(round.parents for result in results for round in result.rounds)


@pytest.mark.parametrize("kind", mostly_exhaustive(LAYOUTS, "qwen3_5", "deepseek_v3"))
def test_layers_that_are_given_the_next_token_are_always_accepted(tmp_path: Path, kind: str) -> None:
    """Negative control: the layers take the hidden state for the token; sampled, since greedy texts soon repeat."""
    greedy, seeded = (SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 0.8))

    def rates(decoder: SpeculativeDecoder, params: SamplingParams) -> list[float]:
        return [result.stats.acceptance_rate or 0.0 for result in decoder.generate(prompts([3, 17, 9]), params)]

    decoder = decoder_of(write_copying_target(tmp_path / "right", kind))
    assert min(rates(decoder, greedy) + rates(decoder, seeded)) == 1
    assert max(rates(decoder_of(write_copying_target(tmp_path / "wrong", kind, swapped=True)), seeded)) < 0.5


FAST: dict[str, dict[str, Any]] = {
    "packed": {"fast": True, "dtype": "bfloat16"},
    "int4": {"fast": "auto", "quantize": "int4"},
    "int8": {"fast": "auto", "quantize": "int8"},
}


@pytest.mark.parametrize("name", mostly_exhaustive(FAST, "packed", "int4"))
def test_fast_and_quantized_targets_keep_the_texts_of_plain_decoding(tmp_path: Path, name: str) -> None:
    """With heads of 64 numbers and whole groups of inputs, which the kernels need."""
    target = write_copying_target(tmp_path, "mimo", dtype=torch.bfloat16, head_dim=64, intermediate_size=64)
    settings = FAST[name]
    decoder = decoder_of(target, **settings)
    assert decoder.target.packed
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=temperature, seed=5)
        results = drafted_as_plain(decoder, prompts([3, 17, 9]), params)
        assert min(result.stats.acceptance_rate or 0.0 for result in results) > 0.9


@needs_avx2
@pytest.mark.parametrize(("name", "changes", "like"), [("qwen3", {}, 1), ("qwen35", {"head_dim": 128}, 3)])
def test_layers_for_the_target_in_a_gguf_file_are_read_by_transformers(
    name: str, changes: dict[str, Any], like: int, tmp_path: Path
) -> None:
    """The target itself is built without transformers."""
    pytest.importorskip("gguf")
    case, head = CASES[name], tmp_path / "head"
    model = write_case(tmp_path / "model.gguf", name, replace(case, settings=case.settings | changes), "Q8_0")
    size, start = model.config.hidden_size, f"model.layers.{like}."
    block = {key.removeprefix(start): x for key, x in model.state_dict().items() if key.startswith(start)}
    layer = block | dict.fromkeys(("token_layernorm.weight", "hidden_layernorm.weight"), torch.ones(size))
    layer |= {"final_layernorm.weight": torch.ones(size), "input_proj.weight": torch.eye(size, 2 * size)}
    head.mkdir()
    save_file({f"mtp_layers.0.{key}": x.clone() for key, x in layer.items()}, head / "model.safetensors")
    (head / "config.json").write_text(json.dumps({"speculators_model_type": "mtp"}))
    decoder = SpeculativeDecoder(
        str(tmp_path / "model.gguf"), str(head), drafter="model", num_draft_tokens=3, reproducible=False
    )
    assert isinstance(decoder.target.model, PlannedModel)
    results = drafted_as_plain(decoder, [[5, 9, 70, 71], [100, 7, 33]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert all(result.stats.num_draft_tokens for result in results)


@pytest.mark.parametrize("in_one_call", [True, False])
def test_the_output_of_the_last_layer_is_kept_as_a_hidden_state(
    in_one_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = fast("qwen2", torch.bfloat16, head_dim=64)
    if backend.stack is None:
        pytest.skip("needs a C compiler and a processor with AVX2")
    if not in_one_call:
        monkeypatch.setattr(backend, "stack", None)
    backend.keep_hidden_states([backend.num_layers])
    backend.reserve(1, 64)
    logits = backend.forward(torch.arange(3, 15)[None], [0], first_slot=0, logits=True)[0]
    hidden = backend.hidden_states([backend.num_layers], 0, 0, 12)
    assert hidden is not None
    expected = backend.model.lm_head(backend.model.model.norm(hidden))
    assert (logits - expected).abs().max() < 0.02 * logits.abs().max()


def test_a_loaded_model_uses_the_mtp_layers_of_its_files_if_asked_to() -> None:
    target = written("glm4_moe")
    model = transformers.AutoModelForCausalLM.from_pretrained(target.folder, dtype="auto")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}  # does not cover these layers
    named = SpeculativeDecoder(model, "mtp", drafter="model", num_draft_tokens=STEPS)
    for drafted in drafts(named, prompts([17])[0]):
        assert drafted.gap(transcription("glm4_moe")) < 1e-5
    assert SpeculativeDecoder(model).draft is None


def test_mtp_layers_draft_by_default_only_without_another_choice() -> None:
    target = written("glm4_moe")
    assert decoder_of(target, drafter="auto", num_draft_tokens="auto").drafter_name == "hybrid"
    for options in ({"drafter": "suffix"}, {"drafter": "none", "num_draft_tokens": "auto"}):
        assert decoder_of(target, **options).draft is None


def changed(tmp_path: Path, change: Callable[[dict[str, Tensor]], None]) -> Written:
    target = write_target(tmp_path, "glm4_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.3.self_attn.q_proj.weight"), "1 tensors do not fit, first 'layers.0.self_attn"),
        (
            lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(32, 32)}),
            r"is \[32, 32\]; allowed: \[32, 64\]",
        ),
        (
            lambda t: t.pop("model.layers.3.hnorm.weight"),
            "has unsupported MTP layers, tensor 'model.layers.3.eh_proj.weight'; allowed: layers",
        ),
    ],
    ids=["block", "shape", "part"],
)
def test_layers_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = changed(tmp_path, change)
    with pytest.raises(SlipstreamError, match=message) as raised:
        SpeculativeDecoder(str(target.folder), "mtp", drafter="model")
    assert "\n" not in str(raised.value)
    assert decoder_of(target, drafter="auto", num_draft_tokens="auto").draft is None  # they were not asked for
    assert ("drafting without the MTP layers" in caplog.text) is ("unsupported MTP layers" not in message)


def test_a_target_without_mtp_layers_is_distinguished_from_unreadable_ones(tmp_path: Path) -> None:
    def without(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            del tensors[name]

    target = changed(tmp_path, without)
    with pytest.raises(SlipstreamError, match="have no MTP layers; allowed: a draft model or none"):
        SpeculativeDecoder(str(target.folder), "mtp", drafter="model")
    hybrid = ["mtp.layers.0.eh_proj.weight", "mtp.layers.0.mixer.q_proj.weight", "mtp.layers.1.mixer.gate.weight"]
    assert mtp_layers(hybrid, 4) == [] and of_another_form(hybrid, 4) == hybrid[0]
    assert of_another_form(["model.layers.3.mlp.up_proj.weight", "lm_head.weight"], 4) is None


def test_targets_and_settings_that_mtp_layers_cannot_serve_are_refused() -> None:
    with pytest.raises(SlipstreamError, match="'toy', whose hidden states cannot be read"):
        SpeculativeDecoder("toy", "mtp", drafter="model")
    folder = str(written("glm4_moe").folder)
    with pytest.raises(SlipstreamError, match="draft_vocabulary=8 with the target's MTP layers; allowed: 'auto'"):
        SpeculativeDecoder(folder, "mtp", draft_vocabulary=8)
    with pytest.raises(SlipstreamError, match="draft_dtype='float16', but draft head 'mtp' has its target's type; "):
        SpeculativeDecoder(folder, "mtp", draft_dtype="float16")


def test_the_user_chooses_the_bits_of_mtp_layers() -> None:
    for draft_dtype, expected in (("int8", True), ("auto", False)):
        decoder = SpeculativeDecoder(str(written("glm4_moe").folder), "mtp", drafter="model", draft_dtype=draft_dtype)
        assert isinstance(decoder.draft.backend.layers[0].project, QuantizedLinear) == expected


def test_mtp_layers_are_found_by_name_in_multimodal_checkpoints_too() -> None:
    parts = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    start = "model.language_model.layers."
    target_layers = [f"{start}{number}.mlp.up_proj.weight" for number in range(3)]
    mtp_tensors = [f"{start}3.{name}" for name in (*parts, "mlp.up_proj.weight", "embed_tokens.weight")]
    (layer,) = mtp_layers([*target_layers, *mtp_tensors], 3)
    assert layer.block == {"mlp.up_proj.weight": f"{start}3.mlp.up_proj.weight"}
    assert mtp_layers([*target_layers, *mtp_tensors[1:]], 3) == []
