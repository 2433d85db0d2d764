"""A checkpoint that a start has described loads without transformers, with the same bits; others load as before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.errors import SlipstreamError
from slipstream.models import described_checkpoints, pretrained
from slipstream.models.decoder.planned_model import PLANNED, PlannedModel
from slipstream.models.described_checkpoints import load_described
from slipstream.models.generation_settings import ModelSettings
from slipstream.models.hf.backend import HFBackend
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.pretrained import load_pretrained
from slipstream.models.weights.safetensors_files import CheckpointFiles
from slipstream.wiring.model_pair import fingerprint_of
from tests.support.gguf_architectures import CASES, model_of
from tests.support.gguf_files import write_chat_model
from tests.support.head_cases import write_head
from tests.support.markers import mostly_slow, needs_avx2
from tests.support.tiny_models import byte_tokenizer

pytestmark = [pytest.mark.usefixtures("own_cache"), needs_avx2]
NAMES = [name for name, case in CASES.items() if case.model_type in PLANNED]
# whose heads the kernels compute
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
FACTORS = {"long_factor": [1.5 + i for i in range(16)], "short_factor": [1.0 + i / 10 for i in range(16)]}
WIDE: dict[str, dict[str, Any]] = {
    "phi3": ONE_HEAD,
    "phi3-longrope": {"rope_parameters": CASES["phi3-longrope"].settings["rope_parameters"] | FACTORS},
    "glm4": {"head_dim": 64},
}
# whose parameters have other names in files, or another order in their digest, or whose heads differ by layer
UNLIKE = {"glm4", *(name for name in NAMES if name.startswith("gemma4"))}
UNLIKE |= {name for name in NAMES if "moe" in name or "mix" in name or "deepseek" in name or "oss" in name}
UNLIKE |= {"granitehybrid", "qwen35"}
IDS = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(4))
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
QUIET = {"reproducible": False, "drafter": "none"}


def write(folder: Path, name: str = "llama", seed: int = 0, **changes: Any) -> str:
    case = CASES[name]
    heads = {} if "head_dim" in case.settings else {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = replace(case, settings=case.settings | heads | WIDE.get(name, {}) | changes).config()
    model_of(config, seed).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def both(source: str, options: LoadOptions) -> tuple[Any, Any]:
    """The model by transformers, whose load describes it, and by its description."""
    return load_pretrained(source, options, None, None), load_described(source, options, None)


def logits(loaded: Any) -> list[torch.Tensor]:
    backend = loaded.backend
    backend.reserve(2, 256)
    whole = backend.forward(IDS, [0], first_slot=0, logits=True)
    return [whole, backend.forward(IDS[:, :7], [0], first_slot=1, logits=True)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", mostly_slow(NAMES, "llama-llama3", "gemma3"))
def test_a_described_model_has_the_bits_and_the_names_of_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    options = LoadOptions(dtype)
    own, planned = both(write(tmp_path / "model", name), options)
    unlike = UNLIKE if dtype == "bfloat16" else {*UNLIKE, "phi3", "phi3-longrope"}
    is_described = name not in unlike and isinstance(own.backend, HFBackend) and own.backend.stack is not None
    assert (planned is not None) == is_described >= (name not in UNLIKE and dtype == "bfloat16")
    if planned is None:
        return
    assert isinstance(planned.model, PlannedModel) and planned.backend.shape_independent
    pairs = list(zip(logits(own), logits(planned), strict=True))
    assert all(torch.equal(*pair) for pair in pairs)
    assert planned.backend.stack is not None and planned.backend.ragged == own.backend.ragged
    names = [
        (each.fingerprint, each.backend.weights_digest(), each.arithmetic, each.end_ids) for each in (own, planned)
    ]
    assert names[0] == names[1]
    _, other = both(write(tmp_path / "other", name, seed=1), options)
    assert not torch.equal(logits(other)[0], pairs[0][0])
    assert other.backend.weights_digest() != planned.backend.weights_digest()


def test_a_sharded_and_tied_checkpoint_has_the_same_bits(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = model_of(replace(CASES["qwen3"], settings=CASES["qwen3"].settings | {"tie_word_embeddings": True}).config())
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    own, planned = both(str(folder), LoadOptions())
    assert all(torch.equal(*pair) for pair in zip(logits(own), logits(planned), strict=True))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, last = sorted(set(index["weight_map"].values()))[:: len(set(index["weight_map"].values())) - 1]
    tensors = load_file(folder / last) | dict(list(load_file(folder / first).items())[:1])
    save_file(tensors, folder / last, {"format": "pt"})
    assert both(str(folder), LoadOptions())[1] is None  # a tensor is in two files


FITTING = {"model.norm.weight": lambda old: old * 1.25}
OTHER: dict[str, dict[str, Callable[[Any], Any]]] = {
    "missing": {"model.norm.weight": lambda old: None},
    "further": {"model.layers.0.self_attn.q_proj.bias": lambda old: torch.zeros(64)},
    "of another shape": {"model.layers.1.mlp.up_proj.weight": lambda old: old[1:].contiguous()},
    "of another type": {"model.norm.weight": lambda old: old.double()},
}


@pytest.mark.parametrize("changes", [*OTHER.values(), FITTING], ids=[*OTHER, "fitting"])
def test_files_that_do_not_fit_their_description_go_through_transformers(
    changes: dict[str, Callable[[Any], Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(described_checkpoints, "identity_of_files", lambda folder: "the same, whatever they hold")
    source = write(tmp_path / "model")
    _, planned = both(source, LoadOptions())
    before = logits(planned)[0]
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    changed = tensors | {name: change(tensors.get(name)) for name, change in changes.items()}
    changed = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(changed, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    again = load_described(source, LoadOptions(), None)
    assert (again is not None) == (changes is FITTING)
    assert again is None or not torch.equal(logits(again)[0], before)


def test_numbers_that_are_not_finite_are_refused_in_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(described_checkpoints, "identity_of_files", lambda folder: "the same, whatever they hold")
    source = write(tmp_path / "model")
    assert both(source, LoadOptions())[1] is not None
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    messages = []
    for read in (load_described, load_pretrained):
        with pytest.raises(
            SlipstreamError, match=r"tensor 'model\.norm\.weight' holds numbers that are not fin"
        ) as error:
            read(source, LoadOptions(), None, *((None,) if read is load_pretrained else ()))
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SlipstreamError, match=r"truncated") as error:
        load_described(source, LoadOptions(), None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "generation_config.json"])
def test_a_changed_file_is_described_again(file: str, tmp_path: Path) -> None:
    source = write(tmp_path / "model")
    assert both(source, LoadOptions())[1] is not None
    path = tmp_path / "model" / file
    content = path.read_bytes()
    path.write_bytes(content)  # the same numbers; only its times differ
    assert load_described(source, LoadOptions(), None) is None
    assert both(source, LoadOptions())[1] is not None


def test_files_that_change_while_they_are_loaded_are_not_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    description_of = pretrained.description_of

    def later(*arguments: Any) -> Any:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
        return description_of(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(pretrained, "description_of", later)
        assert both(source, LoadOptions())[1] is None
    assert both(source, LoadOptions())[1] is not None


@pytest.mark.parametrize(
    "options",
    [
        LoadOptions("float32"),
        LoadOptions(fast=False),
        LoadOptions(rounding="int8"),
        LoadOptions(extra={"attn_implementation": "sdpa"}),
        LoadOptions(extra={"trust_remote_code": True}),
        LoadOptions(device="cuda"),
    ],
    ids=["float32", "fast", "quantize", "load_options", "code", "cuda"],
)
def test_what_only_transformers_loads_is_not_described(options: LoadOptions, tmp_path: Path) -> None:
    source = write(tmp_path / "model")
    assert both(source, LoadOptions())[1] is not None
    if options.device == "auto" and options.rounding == "none":
        load_pretrained(source, options, None, None)
    assert load_described(source, options, None) is None
    in_subfolder = LoadOptions(extra={"subfolder": "model"})
    assert load_described(str(tmp_path), in_subfolder, None) is None


@pytest.mark.parametrize(
    ("setting", "value"), [("attention_multiplier", 0.5), ("logits_scale", 2.0), ("rms_norm_eps", 1e-3)]
)
def test_a_setting_that_no_plan_knows_goes_through_transformers(setting: str, value: float, tmp_path: Path) -> None:
    config = tmp_path / "model" / "config.json"
    source = write(tmp_path / "model")
    config.write_text(json.dumps(json.loads(config.read_text()) | {setting: value}))
    assert (both(source, LoadOptions())[1] is not None) == (setting == "rms_norm_eps")


def test_a_checkpoint_without_safetensors_files_loads_as_before(tmp_path: Path) -> None:
    source = write(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "model" / "pytorch_model.bin")
    weights.unlink()
    own, planned = both(source, LoadOptions())
    assert logits(own)[0].isfinite().all() and planned is None


def test_an_adapter_in_the_folder_goes_through_transformers(tmp_path: Path) -> None:
    source = write(tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": source}))
    options = LoadOptions()
    assert described_checkpoints.checkpoint_identity(source, options) is None
    assert load_described(source, options, None) is None


def test_callers_who_imported_transformers_get_its_objects(tmp_path: Path) -> None:
    source = write(tmp_path / "model")
    for _ in range(2):
        decoder = SpeculativeDecoder(source, **QUIET)
        assert type(decoder.target.model).__name__ == "LlamaForCausalLM"


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models load as in a process that has not imported transformers."""
    monkeypatch.setattr("slipstream.models.load.sys", SimpleNamespace(modules={}))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_process")
def test_decoders_keep_their_fingerprint_text_and_settings(tmp_path: Path) -> None:
    source = write(tmp_path / "model", num_hidden_layers=5, vocab_size=260, bos_token_id=1, eos_token_id=[2, 7])
    byte_tokenizer(TEMPLATE).save_pretrained(source)
    generation = tmp_path / "model" / "generation_config.json"
    brought = {"do_sample": True, "temperature": 0.7, "top_k": 20, "eos_token_id": [2, 9]}
    generation.write_text(json.dumps(json.loads(generation.read_text()) | brought))
    first, second = (SpeculativeDecoder(source, **QUIET) for _ in range(2))
    assert isinstance(second.target.model, PlannedModel) and not isinstance(first.target.model, PlannedModel)
    fingerprints = {fingerprint_of(decoder.target, decoder.shapes) for decoder in (first, second)}
    assert len(fingerprints) == 1 and first.target.end_ids == second.target.end_ids == (2, 9)
    assert ModelSettings.of(first.target) == ModelSettings.of(second.target) != ModelSettings()
    params = SamplingParams(max_tokens=24, seed=3, logprobs=2)
    texts = [decoder.generate("Why?", params) for decoder in (first, second)]
    assert texts[0].token_ids == texts[1].token_ids and texts[0].logprobs == texts[1].logprobs
    head = str(write_head(tmp_path / "head", second.target.model, layers=(1, 2, 4)).folder)
    other = write(tmp_path / "draft", vocab_size=260, bos_token_id=1, eos_token_id=2)
    byte_tokenizer(TEMPLATE).save_pretrained(other)
    gguf = write_chat_model(tmp_path / "draft.gguf", num_hidden_layers=1)
    SpeculativeDecoder(other, **QUIET)
    pairs = [("suffix", None), ("layer_skip:2", None), ("model", head), ("model", other), ("model", gguf)]
    prompts = ["Why? Why? Why?", "And then?"]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    expected = [result.token_ids for result in first.generate(prompts, params)]
    for drafter, draft in pairs:
        decoder = SpeculativeDecoder(source, draft, drafter=drafter, num_draft_tokens=3, reproducible=False)
        assert isinstance(decoder.target.model, PlannedModel)
        results = decoder.generate(prompts, params)
        assert [result.token_ids for result in results] == expected, drafter
        assert results[0].stats.num_draft_tokens > 0
    decoder = SpeculativeDecoder(gguf, source, drafter="model", num_draft_tokens=3, reproducible=False)
    alone = SpeculativeDecoder(gguf, **QUIET)
    results, plain = decoder.generate(prompts, params), alone.generate(prompts, params)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]


@pytest.mark.slow
@pytest.mark.parametrize("draft_dtype", ["auto", "int8", "bfloat16"])
def test_a_described_draft_has_the_bits_of_transformers(draft_dtype: str, tmp_path: Path) -> None:
    options = LoadOptions().for_draft(draft_dtype, "auto")
    own, planned = both(write(tmp_path / "model", hidden_size=128), options)
    assert own.fingerprint == planned.fingerprint
    assert all(torch.equal(*pair) for pair in zip(logits(own), logits(planned), strict=True))


@pytest.mark.slow
def test_smollm2_has_the_bits_and_the_text_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    cached = Path.home() / ".cache" / "slipstream" / "models" / "smollm2"
    if not (cached / "model.safetensors").is_file():
        pytest.skip("needs the default model")
    source = str(shutil.copytree(cached, tmp_path / "smollm2"))
    own, planned = both(source, LoadOptions())
    assert all(torch.equal(*pair) for pair in zip(logits(own), logits(planned), strict=True))
    assert own.fingerprint == planned.fingerprint
    files = CheckpointFiles(source, source)
    norm = planned.model.model.layers[29].input_layernorm.weight
    assert torch.equal(norm, files.whole("model.layers.29.input_layernorm.weight"))
    weight = planned.model.get_input_embeddings().weight
    weight[int(IDS[0, 3])] += 1.0  # one row of the embedding
    assert not torch.equal(logits(planned)[0], logits(own)[0])


def test_descriptions_are_read_only_where_all_was_loaded(tmp_path: Path, own_cache: Path) -> None:
    source = write(tmp_path / "model")
    loaded: Loaded = load_pretrained(source, LoadOptions(), byte_tokenizer(TEMPLATE), None)
    assert loaded.tokenizer is not None and not (own_cache / "checkpoints").exists()


def with_template(folder: Path, template: str) -> str:
    """A model whose template is in its tokenizer's settings, where JSON may hold any text."""
    source, settings = write(folder, vocab_size=260), folder / "tokenizer_config.json"
    byte_tokenizer(None).save_pretrained(source)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    return source


@pytest.mark.parametrize("more", ["\r\n{# end #}\r", "\ud83d"], ids=["line ends", "half a character"])
def test_templates_stay_as_they_are(more: str, tmp_path: Path) -> None:
    own, planned = both(with_template(tmp_path / "model", TEMPLATE + more), LoadOptions())
    assert planned.tokenizer.inner.chat_template == TEMPLATE + more
    assert planned.tokenizer.digest() == own.tokenizer.digest()


def test_further_templates_go_through_transformers(tmp_path: Path) -> None:
    source, further = with_template(tmp_path / "model", TEMPLATE), tmp_path / "model" / "additional_chat_templates"
    assert both(source, LoadOptions())[1] is not None
    further.mkdir()
    (further / "tool_use.jinja").write_text("{{ tools }}")
    assert both(source, LoadOptions())[1] is None


def test_a_damaged_tokenizer_in_the_cache_is_saved_again(tmp_path: Path, own_cache: Path) -> None:
    source = with_template(tmp_path / "model", TEMPLATE)
    own, planned = both(source, LoadOptions())
    assert planned is not None
    (file,) = own_cache.glob("tokenizers/*/tokenizer.json")
    file.write_text("{")
    assert load_described(source, LoadOptions(), None) is None
    assert both(source, LoadOptions())[1].tokenizer.digest() == own.tokenizer.digest()
