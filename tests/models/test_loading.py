"""From a name to a model: what loads, what is refused and in which words, and what loading must leave alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import VOCAB, fresh, prompts, reference, shared, tokenizer

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError
from slipstream.models.cpu.packed_linear import PackedLinear, unsupported
from slipstream.models.hf import model_files as files

PARAMS = SamplingParams(max_tokens=12)
PROMPT = prompts([9])[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as `save_pretrained` leaves it, with a tokenizer that has a chat template."""
    path = tmp_path_factory.mktemp("saved")
    shared("llama").save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def one_line(error: pytest.ExceptionInfo[SlipstreamError]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


@pytest.mark.parametrize("fast", [False, "auto", True])
def test_a_saved_folder_says_what_the_model_says(folder: Path, fast: Any) -> None:
    made = SpeculativeDecoder(str(folder), dtype="float32", device="cpu", fast=fast)
    assert made.generate(PROMPT, PARAMS).token_ids == reference(shared("llama"), PROMPT, 12)
    assert made.target.packed == (fast is not False)
    assert made.generate("hi", PARAMS).prompt_token_ids == tokenizer()("u:hi.a:")["input_ids"]


def test_a_path_object_and_a_draft_folder_load(folder: Path) -> None:
    made = SpeculativeDecoder(folder, folder, drafter="model", num_draft_tokens=3)  # type: ignore[arg-type]
    result = made.generate("hello", PARAMS)
    assert result.stats.acceptance_rate == 1


def test_a_folder_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    shared("gpt2").save_pretrained(tmp_path)
    made = SpeculativeDecoder(str(tmp_path), fast=False)
    assert made.generate(PROMPT, PARAMS).token_ids == reference(shared("gpt2"), PROMPT, 12)
    with pytest.raises(UsageError, match="no tokenizer"):
        made.generate("text", PARAMS)


def test_the_requested_dtype_is_loaded_and_load_options_are_passed_on(folder: Path) -> None:
    made = SpeculativeDecoder(str(folder), dtype="bfloat16", fast=False, load_options={"attn_implementation": "eager"})
    assert made.target.model.dtype == torch.bfloat16
    assert made.target.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"device": "meta"}, {"load_options": {"device_map": "cpu"}}]
)
def test_a_loaded_model_is_not_told_to_be_another(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        SpeculativeDecoder(shared("llama"), **options)


def test_end_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    model = fresh("llama")
    model.config.eos_token_id, model.generation_config.eos_token_id = 4, [5, 6]
    assert SpeculativeDecoder(model).target.end_ids == (5, 6)
    model.generation_config.eos_token_id = None
    assert SpeculativeDecoder(model).target.end_ids == (4,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "is not a folder"),
        ("./nowhere", "is not a folder"),
        ("no/such.gguf", "does not exist"),
        ("toy:x", "allowed: 'toy' or 'toy:ORDER'"),
    ],
)
def test_a_missing_model_is_named(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        SpeculativeDecoder(name)
    assert name.removeprefix("./") in one_line(error)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        SpeculativeDecoder(str(tmp_path))


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"not what it should be"])
def test_a_damaged_file_is_one_clear_line(folder: Path, tmp_path: Path, broken: str, content: bytes) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(content if file.name == broken else file.read_bytes())
    with pytest.raises(SlipstreamError) as error:
        SpeculativeDecoder(str(tmp_path))
    assert str(tmp_path) in one_line(error)


def test_a_folder_without_weights_is_one_clear_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(SlipstreamError, match="could not be loaded") as error:
        SpeculativeDecoder(str(tmp_path))
    one_line(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"PK\x03\x04 a zip", "not a GGUF file"), (b"GGUF" + b"\x07" * 64, "could not be read as GGUF")],
)
def test_a_broken_gguf_file_is_refused_and_leaves_nothing_behind(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(cache))
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(SlipstreamError, match=message) as error:
        SpeculativeDecoder(str(file))
    assert "broken.gguf" in one_line(error)
    assert not cache.exists() or not list(cache.iterdir())


def test_a_hub_id_without_network_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to the hub.\nCheck your internet connection.")

    monkeypatch.setattr(files.AutoModelForCausalLM, "from_pretrained", unreachable)
    with pytest.raises(SlipstreamError, match="'someone/something' is no local folder, and the hub did not") as error:
        SpeculativeDecoder("someone/something")
    one_line(error)


def _mamba() -> Any:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=1)
    )


def _t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [(_mamba, "MambaForCausalLM.*recurrent"), (_t5, "T5ForConditionalGeneration.*encoder-decoder")],
)
def test_models_without_positions_to_go_back_to_are_refused_by_name(build: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        SpeculativeDecoder(build())
    one_line(error)
    with pytest.raises(UsageError, match=message):
        SpeculativeDecoder(shared("llama"), build())


def test_a_model_without_a_language_head_is_refused() -> None:
    with pytest.raises(UsageError, match=r"LlamaModel is not supported"):
        SpeculativeDecoder(shared("llama").model)


def test_an_unknown_device_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"device='abacus'.*allowed: auto, cpu, cuda") as error:
        SpeculativeDecoder(str(folder), device="abacus")
    one_line(error)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="device='cuda'"):
            SpeculativeDecoder(str(folder), device="cuda")


def test_fast_says_why_it_cannot(folder: Path) -> None:
    assert "float64" in str(unsupported(fresh("llama", dtype=torch.float64)))
    with pytest.raises(UsageError, match=r"fast=True, but LlamaForCausalLM cannot be packed: .*float64"):
        SpeculativeDecoder(fresh("llama", dtype=torch.float64), fast=True)
    with pytest.raises(UsageError, match=r"fast=True.*float16"):
        SpeculativeDecoder(str(folder), dtype="float16", fast=True)
    assert not SpeculativeDecoder(str(folder), dtype="float16").target.packed


@pytest.mark.parametrize("fast", ["auto", False])
def test_a_users_own_model_is_left_as_it_was(fast: Any) -> None:
    model = fresh("llama")
    kinds = [type(module) for module in model.modules()]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    config = model.config.to_dict()
    made = SpeculativeDecoder(model, fast=fast)
    made.generate(PROMPT, PARAMS)
    assert not made.target.packed
    assert [type(module) for module in model.modules()] == kinds
    assert model.config.to_dict() == config
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert model.generate(torch.tensor([PROMPT]), max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] == 12


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [1, 3, 4, 17])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_packed_layer_is_the_linear_layer_it_replaces(
    dtype: torch.dtype, tolerance: float, width: int, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(48, 33, bias=bias, dtype=dtype)
    with torch.no_grad():
        for weight in linear.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / 7)
    x = torch.randn(2, width, 48, generator=generator).to(dtype)
    with torch.inference_mode():
        got = PackedLinear(linear, 4)(x)
        assert got.shape == (2, width, 33) and got.dtype == dtype
        torch.testing.assert_close(got, linear(x), rtol=tolerance, atol=tolerance)
        if bias:
            linear.bias += 1
            assert not torch.allclose(got, linear(x), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma3"])
def test_a_packed_model_keeps_its_greedy_text(name: str) -> None:
    model = fresh(name)
    made = SpeculativeDecoder(model, num_draft_tokens=3, fast=True)
    assert any(type(module) is PackedLinear for module in model.modules())
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    assert made.target.packed
    assert made.generate(PROMPT, PARAMS).token_ids == reference(shared(name), PROMPT, 12)


def test_a_packed_model_serves_a_second_decoder() -> None:
    model = fresh("llama")
    first = SpeculativeDecoder(model, fast=True).generate(PROMPT, PARAMS)
    assert SpeculativeDecoder(model, model).generate(PROMPT, PARAMS).token_ids == first.token_ids


def test_a_draft_folder_is_compared_by_its_own_tokenizer(tmp_path: Path) -> None:
    fresh("llama", vocab_size=VOCAB + 1).save_pretrained(tmp_path)
    other = tokenizer(extra=["!!"])
    other.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="another vocabulary"):
        SpeculativeDecoder(shared("llama"), str(tmp_path), tokenizer=tokenizer())


def test_a_model_of_the_cache_folder_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    shared("llama").save_pretrained(tmp_path / "little")
    assert files.resolve("little") == str(tmp_path / "little")
    assert [model["name"] for model in files.list_models()] == ["little"]
    assert files.resolve("other") == "other"  # a hub id
