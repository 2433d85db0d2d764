"""Models built from their plan are transformers' models: plan, parameters, rotary angles and logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models import quantized_models
from slipstream.models.cpu.block_experts import expert_blocks
from slipstream.models.decoder.attention import MaskBuilder
from slipstream.models.decoder.families import plan_of
from slipstream.models.decoder.planned_model import PLANNED, PlannedModel, planned_model
from slipstream.models.hf.backend import HFBackend
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.gguf_architectures import settings_of
from slipstream.models.weights.gguf_configuration import described
from slipstream.models.weights.gguf_conversion import dequantized
from slipstream.models.weights.gguf_file import read_header
from tests.support.gguf_architectures import CASES, Case, architecture, write_case
from tests.support.head_cases import write_head
from tests.support.markers import needs_avx2
from tests.support.quantized_files import kl

pytest.importorskip("gguf")
NAMES = [name for name, case in CASES.items() if case.model_type in PLANNED]
# whose attention is a module of their own, as in transformers
ATTENDS_BY_ITSELF = ("qwen3_5_text", "qwen3_5_moe_text", "gemma4_text", "deepseek_v2", "glm4_moe_lite")
IDS = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(4))


pytestmark = pytest.mark.usefixtures("own_cache")


def test_every_planned_type_is_among_the_cases() -> None:
    assert {CASES[name].model_type for name in NAMES} == PLANNED.keys()


@pytest.mark.parametrize("name", NAMES)
def test_plan_parameters_and_angles_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    write_case(tmp_path / "model.gguf", architecture(name), CASES[name])
    header = read_header(tmp_path / "model.gguf")
    reference, planned = dequantized(header, described(header), torch.float32), planned_model(settings_of(header))
    assert planned is not None and planned.config.architectures == [type(reference).__name__]
    plan = plan_of(reference.config, MaskBuilder(reference).windows)
    assert planned.plan == plan.with_layers(angles_in_pairs=False, angles_of_pairs=False)
    blocks = tuple(f"{block}." for block, _ in expert_blocks(reference))
    assert [name for name, _ in expert_blocks(planned)] == [block.rstrip(".") for block in blocks]
    found, wanted = (
        {key: p.shape for key, p in model.named_parameters() if not key.startswith(blocks)}
        for model in (planned, reference)
    )
    assert found == {**wanted, "lm_head.weight": wanted["model.embed_tokens.weight"]}
    ids, positions = torch.tensor([[5, 0]]), torch.tensor([[0, 1, 77, 300, 511]])
    weight, embedding = reference.get_input_embeddings().weight, planned.get_input_embeddings()
    embedded = torch.func.functional_call(embedding, {"weight": weight}, (ids,))
    assert torch.equal(embedded, reference.get_input_embeddings()(ids))
    if not plan.rotates:
        return
    module, rotary = (model.get_decoder().get_submodule(plan.rotary) for model in (reference, planned))
    for kind, rope_type in rotary.rope_type.items():
        by_kind = isinstance(module.rope_type, dict)
        expected = module(embedded, positions, **({"layer_type": kind} if by_kind else {}))
        if isinstance(expected, torch.Tensor):
            expected = expected.real, expected.imag
        angles = rotary(embedded, positions, kind)
        if plan.layers[0].angles_in_pairs:
            expected = [part[..., ::2].repeat(1, 1, 2) for part in expected]
        if plan.layers[0].angles_of_pairs:
            expected = [part.repeat(1, 1, 2) for part in expected]
        assert all(torch.equal(*pair) for pair in zip(angles, expected, strict=True)), rope_type


def logits(backend: Any) -> list[torch.Tensor]:
    backend.reserve(2, 256)
    whole = backend.forward(IDS, [0], first_slot=0, logits=True)
    return [whole, backend.forward(IDS[:, :7], [0], first_slot=1, logits=True)]


# these sizes of heads are not for the kernels, so that layers run operator by operator
SMALL_HEADS = {"qwen35": {"head_dim": 128}, "qwen35moe": {"head_dim": 128}}


@pytest.mark.slow
@needs_avx2
@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in NAMES), *SMALL_HEADS.items()])
def test_logits_have_the_bits_of_transformers_model_over_the_same_kernels(
    name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, case = str(tmp_path / "model.gguf"), CASES[name]
    write_case(Path(file), architecture(name), replace(case, settings=case.settings | changes), "Q8_0")
    planned = load(file, LoadOptions())
    assert isinstance(planned.model, PlannedModel) and isinstance(planned.backend, HFBackend)
    layer_by_layer = planned.model(input_ids=IDS, logits_to_keep=3).logits
    monkeypatch.setattr(quantized_models, "planned_model", lambda settings: None)
    reference = load(file, LoadOptions())
    assert isinstance(reference.backend, HFBackend) and not isinstance(reference.model, PlannedModel)
    assert (planned.backend.stack is None) == (reference.backend.stack is None)
    assert planned.backend.shape_independent == reference.backend.shape_independent
    pairs = list(zip(logits(planned.backend), logits(reference.backend), strict=True))
    assert (planned.backend.stack is not None) >= bool(changes)
    is_equal = planned.backend.stack is not None or planned.model.config.model_type in ATTENDS_BY_ITSELF
    assert all(torch.equal(*pair) for pair in pairs if is_equal)
    assert all(torch.allclose(*pair, atol=1e-4) for pair in pairs)
    assert planned.end_ids == reference.end_ids and planned.arithmetic == reference.arithmetic
    if name not in (
        "phi3",
        "phi3-longrope",
        "glm4",
        "qwen35",
        "qwen35moe",
    ):  # whose modules transformers has in another order
        assert planned.backend.weights_digest() == reference.backend.weights_digest()
    assert kl(layer_by_layer, pairs[0][0][:, -3:]) < 0.02 < kl(layer_by_layer, pairs[0][0][:, :3])
    assert not torch.equal(pairs[0][0][:, 1:8], pairs[0][0][:, :7])


@pytest.mark.slow
@needs_avx2
def test_drafts_batches_trees_and_heads_keep_the_text(tmp_path: Path) -> None:
    case = CASES["llama"]
    write_case(
        tmp_path / "model.gguf", "llama", replace(case, settings=case.settings | {"num_hidden_layers": 5}), "Q8_0"
    )
    plain = SpeculativeDecoder(str(tmp_path / "model.gguf"), drafter="none", reproducible=False)
    model, params = plain.target.model, SamplingParams(max_tokens=24, ignore_eos=True)
    assert isinstance(model, PlannedModel)
    head = str(write_head(tmp_path / "head", model, layers=(1, 2, 4)).folder)
    prompts = [[5, 9, 5, 9, 5, 9, 70, 71], [100, 7, 33]]
    texts = [result.token_ids for result in plain.generate(prompts, params)]
    for drafter, draft in (("suffix", None), ("layer_skip:2", None), ("model", head), ("token_recycling", None)):
        decoder = SpeculativeDecoder(
            str(tmp_path / "model.gguf"), draft, drafter=drafter, num_draft_tokens=3, reproducible=False
        )
        results = decoder.generate(prompts, params)
        assert [result.token_ids for result in results] == texts, drafter
        assert results[0].stats.num_draft_tokens > 0


def wide_longrope() -> Case:
    """With heads that the kernels compute."""
    case = CASES["phi3-longrope"]
    factors = {"long_factor": [1.5 + i for i in range(16)], "short_factor": [1.0 + i / 10 for i in range(16)]}
    rope = {"rope_parameters": case.settings["rope_parameters"] | factors}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return replace(case, settings=case.settings | rope | heads)


@pytest.mark.slow
@needs_avx2
@pytest.mark.parametrize("in_one_call", [True, False])
def test_texts_that_become_long_are_those_of_transformers_model(
    in_one_call: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, case = tmp_path / "model.gguf", wide_longrope() if in_one_call else CASES["phi3-longrope"]
    write_case(file, "phi3", case, "Q8_0", **({"rope.dimension_count": 32} if in_one_call else {}))
    params, backends = SamplingParams(max_tokens=24, ignore_eos=True), []
    texts = []
    for drafter in ("none", "suffix", "none"):
        decoder = SpeculativeDecoder(str(file), drafter=drafter, reproducible=False)
        backend = decoder.target.backend
        assert isinstance(backend, HFBackend) and (backend.stack is not None) == in_one_call
        assert backend.longest_short == 64 and backend.reads_anew
        backends.append(backend)
        prompts = [[int(i) for i in IDS[0, :count] for _ in range(2)] for count in (20, 30, 35)]  # 64 tokens are short
        texts.append([result.token_ids for result in decoder.generate(prompts, params)])
        if drafter == "suffix":
            monkeypatch.setattr(quantized_models, "planned_model", lambda settings: None)
    assert texts[0] == texts[1] == texts[2]
    assert [isinstance(backend.model, PlannedModel) for backend in backends] == [True, True, False]
    found = [backend.forward(IDS[:, :7], [0], first_slot=0, logits=True) for backend in backends[::2]]
    assert torch.equal(*found)
    for backend in backends[::2]:
        backend.read_as(0, is_long=True)
    of_long = [backend.forward(IDS[:, :7], [0], first_slot=0, logits=True) for backend in backends[::2]]
    assert torch.equal(*of_long) and not torch.equal(of_long[0], found[0])


def test_other_models_are_left_to_transformers(tmp_path: Path) -> None:
    latent = CASES["deepseek2-joint"]
    # the kernels do not attend to latents of this size
    narrow = replace(latent, settings=latent.settings | {"qk_nope_head_dim": 48})
    write_case(tmp_path / "deepseek2.gguf", "deepseek2", narrow)
    assert planned_model(settings_of(read_header(tmp_path / "deepseek2.gguf"))) is None
    write_case(tmp_path / "llama.gguf", "llama", CASES["llama"])
    settings = settings_of(read_header(tmp_path / "llama.gguf"))
    assert planned_model(settings) is not None
    assert planned_model(settings | {"residual_scale": 0.5}) is None  # a field that the plan does not read
