"""From a name to a model: what loads, what is refused and how, and what loading must not change."""

import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError
from slipstream.models import plain_models
from slipstream.models.cpu.packed_linear import PackedLinear, unsupported
from slipstream.models.loaded import LoadOptions
from slipstream.models.plain_models import load_model
from slipstream.models.weights import gguf_configuration
from slipstream.models.weights import model_files as files
from slipstream.models.weights.gguf_file import read_header
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.tokenizer_loading import inspect_vocabulary
from slipstream.models.weights.transformers_reader import auto_class, check_finite
from tests.support.gguf_files import write_chat_model, write_model
from tests.support.markers import subcases
from tests.support.tiny_models import VOCAB, fresh, prompts, reference, shared, tokenizer

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
def test_a_saved_folder_generates_the_text_of_its_model(folder: Path, fast: Any) -> None:
    decoder = SpeculativeDecoder(str(folder), dtype="float32", device="cpu", fast=fast, reproducible=False)
    assert decoder.generate(PROMPT, PARAMS).token_ids == reference(shared("llama"), PROMPT, 12)
    assert decoder.target.packed == (fast is not False)
    assert decoder.generate("hi", PARAMS).prompt_token_ids == tokenizer()("u:hi.a:")["input_ids"]


def test_a_path_object_and_a_draft_folder_load(folder: Path) -> None:
    decoder = SpeculativeDecoder(folder, folder, drafter="model", num_draft_tokens=3, reproducible=False)  # type: ignore[arg-type]
    result = decoder.generate("hello", PARAMS)
    assert result.stats.acceptance_rate == 1


def test_a_folder_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    shared("gpt2").save_pretrained(tmp_path)
    decoder = SpeculativeDecoder(str(tmp_path), fast=False, reproducible=False)
    assert decoder.generate(PROMPT, PARAMS).token_ids == reference(shared("gpt2"), PROMPT, 12)
    with pytest.raises(UsageError, match=r"no tokenizer; allowed: put tokenizer\.json into its folder") as error:
        decoder.generate("text", PARAMS)
    assert str(tmp_path) in one_line(error)


def test_the_requested_dtype_is_loaded_and_load_options_are_passed_on(folder: Path) -> None:
    options = {"attn_implementation": "eager"}
    decoder = SpeculativeDecoder(str(folder), dtype="bfloat16", fast=False, reproducible=False, load_options=options)
    assert decoder.target.model.dtype == torch.bfloat16
    assert decoder.target.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"device": "meta"}, {"load_options": {"device_map": "cpu"}}]
)
def test_options_of_loading_are_refused_for_a_loaded_model(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        SpeculativeDecoder(shared("llama"), **options)


def test_end_ids_are_those_of_generate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = fresh("llama")
    model.config.eos_token_id, model.generation_config.eos_token_id = 4, [5, 6]
    assert SpeculativeDecoder(model).target.end_ids == (5, 6) and not caplog.text
    model.generation_config.eos_token_id = None
    assert SpeculativeDecoder(model).target.end_ids == ()
    assert "generation_config names no end token" in caplog.text and "stop_token_ids=[4]" in caplog.text
    model.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path / "bare")
    for folder, ends in (
        (tmp_path, ()),
        (tmp_path / "bare", (4,)),
    ):  # without generation_config.json, config.json counts
        if folder != tmp_path:
            (folder / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
        assert inspect_vocabulary(str(folder)).end_ids == ends
        for fast in (False, "auto"):
            assert SpeculativeDecoder(str(folder), fast=fast, reproducible=False).target.end_ids == ends


def test_a_model_without_layers_is_refused_in_one_line(tmp_path: Path) -> None:
    model = fresh("llama", num_hidden_layers=0)
    model.save_pretrained(tmp_path)
    for source in (model, str(tmp_path)):
        with pytest.raises(UsageError, match=r"^model LlamaForCausalLM has num_hidden_layers=0; allowed: at least one"):
            SpeculativeDecoder(source)


@pytest.mark.parametrize(
    "kind", [torch.tensor, np.array, lambda ids: list(np.array(ids))], ids=["tensor", "array", "list"]
)
def test_end_ids_may_be_a_tensor_as_in_generate(kind: Any) -> None:
    model = fresh("llama")
    model.generation_config.eos_token_id = kind([5, 6, VOCAB])
    assert SpeculativeDecoder(model, reproducible=False).target.end_ids == (5, 6)


@pytest.mark.parametrize("ends", ["5", [5, None], [[5]], 1.5, True])
def test_invalid_end_ids_are_refused_in_one_line(ends: Any, tmp_path: Path) -> None:
    model = fresh("llama")
    model.save_pretrained(tmp_path)
    model.generation_config.eos_token_id = ends
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    reason = re.escape(f"has eos_token_id={ends!r}; allowed: None, a token id or a list of them")
    for load in (SpeculativeDecoder, inspect_vocabulary):
        with pytest.raises(UsageError, match=f"^model '.*' {reason}$"):
            load(model if load is SpeculativeDecoder else str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "is not a folder"),
        ("./nowhere", "is not a folder"),
        ("~no-such-user/nowhere", "is not a folder"),
        ("no/such.gguf", "does not exist"),
        ("toy:x", "allowed: 'toy' or 'toy:ORDER'"),
    ],
)
def test_a_missing_model_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        SpeculativeDecoder(name)
    assert name.removeprefix("./") in one_line(error)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        SpeculativeDecoder(str(tmp_path))


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"not what it should be"])
def test_a_damaged_file_is_refused_in_one_line(folder: Path, tmp_path: Path, broken: str, content: bytes) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(content if file.name == broken else file.read_bytes())
    with pytest.raises(SlipstreamError) as error:
        SpeculativeDecoder(str(tmp_path))
    assert str(tmp_path) in one_line(error)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json", "model.gguf"])
def test_a_pointer_of_git_lfs_is_refused_as_such(folder: Path, tmp_path: Path, name: str) -> None:
    copied = shutil.copytree(folder, tmp_path / "clone")
    if name.endswith("bin"):
        (copied / "model.safetensors").unlink()
    (copied / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12ab\nsize 93\n")
    with pytest.raises(SlipstreamError, match=f"{name}' is only a pointer of Git LFS; .*`git lfs pull` fetches$"):
        SpeculativeDecoder(copied / name if name.endswith("gguf") else copied)


@pytest.mark.parametrize("content", [pickle.dumps(print, 2), b"not what it should be"])
def test_a_bin_file_of_more_than_tensors_is_refused_in_one_line(folder: Path, tmp_path: Path, content: bytes) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    (copied / "model.safetensors").unlink()
    (copied / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(SlipstreamError, match=r"its \.bin file is damaged, or holds more than tensors") as error:
        SpeculativeDecoder(copied)
    one_line(error)


def test_a_folder_whose_name_begins_with_a_tilde_is_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "~no-such-user")
    monkeypatch.chdir(tmp_path)
    assert SpeculativeDecoder("~no-such-user").generate(PROMPT, PARAMS).token_ids == reference(
        shared("llama"), PROMPT, 12
    )


def changed(folder: Path, into: Path, **changes: Any) -> str:
    """A copy of a model folder with another config.json."""
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (into / "config.json").write_text(json.dumps(config))
    return str(into)


def test_weights_of_another_architecture_are_refused_by_the_names_of_those_missing(
    folder: Path, tmp_path: Path
) -> None:
    other = changed(folder, tmp_path, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    with pytest.raises(
        SlipstreamError, match=r"do not fit config\.json: \d+ are missing, first .*transformer\.h\.0"
    ) as error:
        SpeculativeDecoder(other)
    assert other in one_line(error)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    fresh("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 (a reader is no dict)
    assert SpeculativeDecoder(str(tmp_path), fast=False).generate(PROMPT, PARAMS).token_ids


def test_one_missing_weight_is_named(folder: Path, tmp_path: Path) -> None:
    changed(folder, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(SlipstreamError, match=r"1 are missing, first model\.norm\.weight"):
        SpeculativeDecoder(str(tmp_path))


def test_weights_of_other_shapes_are_refused_with_both_shapes(folder: Path, tmp_path: Path) -> None:
    inner_size = shared("llama").config.intermediate_size
    other = changed(folder, tmp_path, intermediate_size=inner_size + 4)
    with pytest.raises(SlipstreamError, match=r"weights have another shape, first .*mlp") as error:
        SpeculativeDecoder(other)
    assert f"{inner_size}" in one_line(error) and f"{inner_size + 4}) by config.json" in one_line(error)
    load_options = {"ignore_mismatched_sizes": True}  # the caller accepts the mismatch
    SpeculativeDecoder(other, fast=False, reproducible=False, load_options=load_options)


@subcases("number, dtype", [(float("nan"), "float32"), (float("inf"), "bfloat16"), (-float("inf"), "float16")])
def test_weights_that_are_no_finite_numbers_are_refused(number: float, dtype: str, tmp_path: Path) -> None:
    model = fresh("llama").to(getattr(torch, dtype))
    check_finite("m", torch.nn.Linear(8, 8).requires_grad_(False).apply(lambda layer: layer.weight.fill_(3e38)))
    model.model.layers[1].mlp.up_proj.weight.data[3, 2] = number
    model.save_pretrained(tmp_path)
    with pytest.raises(SlipstreamError, match=r"tensor 'model.layers.1.mlp.up_proj.weight' holds numbers that are not"):
        SpeculativeDecoder(str(tmp_path), dtype=dtype)


def test_weights_that_the_model_does_not_use_are_refused(folder: Path, tmp_path: Path) -> None:
    layers = shared("llama").config.num_hidden_layers
    fewer = changed(folder, tmp_path, num_hidden_layers=layers - 1, layer_types=None)
    with pytest.raises(
        SlipstreamError, match=rf"\d tensors of the file are not used, first model.layers.{layers - 1}."
    ):
        SpeculativeDecoder(fewer, fast=False, reproducible=False)


def test_an_invalid_configuration_is_refused_with_field_and_value(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"'hidden_size'.*expected int, got str \(value: 'wide'\)") as error:
        SpeculativeDecoder(changed(folder, tmp_path, hidden_size="wide"))
    one_line(error)


def test_loading_hides_transformers_progress_bars_and_restores_its_settings(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers.utils.logging.enable_progress_bar()
    verbosity = transformers.utils.logging.get_verbosity()
    SpeculativeDecoder(str(folder), fast=False, reproducible=False)
    assert "Loading weights" not in capfd.readouterr().err
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert transformers.utils.logging.get_verbosity() == verbosity


def test_a_folder_without_weights_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
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


def test_an_import_error_of_the_gguf_reader_names_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ImportError("cannot import name 'Reader' from 'somewhere'")
    assert "cannot import name 'Reader'" in str(gguf_configuration.unreadable_gguf(tmp_path, error))
    monkeypatch.setattr(gguf_configuration, "PACKAGES", ("json", "no_such_package"))
    message = str(gguf_configuration.unreadable_gguf(tmp_path, error))
    assert "needs no_such_package; run: pip install no_such_package" in message and "json" not in message


@pytest.mark.parametrize("place", ["/proc/x", "file"])
def test_a_conversion_without_a_cache_folder_is_refused(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    write_model(tmp_path / "some.gguf")
    cache = str(tmp_path / place)
    monkeypatch.setenv("SLIPSTREAM_MODELS", cache)
    for name in (str(tmp_path / "some.gguf"), "smollm2"):
        with pytest.raises(
            SlipstreamError, match=r"must be converted, but .* cannot be written .*SLIPSTREAM_MODELS"
        ) as error:
            SpeculativeDecoder(name)
        assert cache in one_line(error)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Lets no file grow beyond this size, as if the disk were full then."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_conversion_that_the_disk_cannot_hold_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "cache"))
    write_chat_model(tmp_path / "some.gguf")
    header, reason = read_header(tmp_path / "some.gguf"), r"some.gguf must be converted, but .* cannot be written"
    with largest_file(100), pytest.raises(SlipstreamError, match=reason):  # too small for tokenizer.json
        gguf_configuration.described(header)
    whole = gguf_configuration.described(header)
    assert [folder.name for folder in whole.parent.iterdir()] == [whole.name]
    weights = Path(resolve(str(tmp_path / "some.gguf"))) / "model.safetensors"
    num_bytes = weights.stat().st_size - 1
    assert num_bytes > (whole / "tokenizer.json").stat().st_size
    shutil.rmtree(weights.parent)
    with largest_file(num_bytes), pytest.raises(SlipstreamError, match=reason):
        resolve(str(tmp_path / "some.gguf"))
    assert [folder.name for folder in (tmp_path / "cache").iterdir() if folder.name != "trials"] == ["gguf"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_damaged_file_of_the_cache_is_refused_with_its_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "cache"))
    write_chat_model(tmp_path / "some.gguf")
    folder = gguf_configuration.described(read_header(tmp_path / "some.gguf"))
    (folder / name).write_text("")
    with pytest.raises(SlipstreamError, match=r"delete the folder .*to create it again") as error:
        SpeculativeDecoder(str(tmp_path / "some.gguf"))
    assert str(folder) in str(error.value)
    shutil.rmtree(folder)
    assert SpeculativeDecoder(str(tmp_path / "some.gguf")).generate("Hi", max_tokens=1).text is not None


@pytest.mark.parametrize("name", ["a prompt in a model's place " * 20, "./" + "d" * 300, "a/b/" + "c" * 5000])
def test_a_name_that_no_file_can_have_is_refused_in_one_line(name: str) -> None:
    for load in (SpeculativeDecoder, inspect_vocabulary, lambda draft: SpeculativeDecoder("toy", draft)):
        with pytest.raises(UsageError, match=r"cannot be looked up: file name too long; Available here: .*smollm2"):
            load(name)


def test_a_misspelt_model_name_is_refused_with_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    (tmp_path / "qwen0.5b").mkdir()
    (tmp_path / "qwen0.5b" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"'smolm2'; did you mean smollm2\? Available here: qwen0\.5b, smollm2, toy;"):
        resolve("smolm2")
    with pytest.raises(UsageError, match=r"did you mean qwen0\.5b\?"):
        resolve("qwen0.5")
    assert resolve("gpt2") == "gpt2"  # a hub id
    error = OSError("no network\nat all")
    assert "it is not asked, as HF_HUB_OFFLINE is set" in str(files.not_loaded("gpt2", "gpt2", error))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    message = str(files.not_loaded("gpt2", "gpt2", error))
    assert "Available here: qwen0.5b, smollm2, toy;" in message and "no network at all" in message
    assert "(did you mean smollm2?)" in str(files.not_loaded("smol", "smol", OSError("no network")))


def test_damaged_models_of_the_cache_are_skipped_with_a_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    for name, content in (("a", b"{"), ("b", b"\xff"), ("c", b"[]"), ("d", b'{"architectures": 5}'), ("e", b"{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(content)
    (tmp_path / "whole").mkdir()
    changed(folder, tmp_path / "whole")
    assert [model["name"] for model in files.list_models()] == ["whole"]
    assert [str(tmp_path / name) in caplog.text for name in "abcde"] == [True] * 5


@pytest.mark.parametrize("place", ["/proc/x", "file"])
def test_an_invalid_cache_folder_holds_no_models(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / place))
    assert files.list_models() == [] and resolve("gpt2") == "gpt2"


@pytest.mark.parametrize("option", [{"device": "tpu"}, {"dtype": "bfloat16"}, {"load_options": {"x": 1}}])
def test_options_of_loading_are_refused_for_the_toy_model(option: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match=rf"{next(iter(option))}=.*the toy model .* runs on the CPU; allowed: "
    ) as error:
        SpeculativeDecoder("toy", **option)
    assert ("'auto' or 'cpu'" in one_line(error)) == ("device" in option)
    assert SpeculativeDecoder("toy", device="cpu").target.name == "toy"


def test_finding_models_imports_no_framework() -> None:
    code = (
        "import sys; from slipstream.models.weights.model_files import list_models, quiet; quiet(); list_models();"
        "from slipstream.models.weights.resolve import resolve;"
        "resolve('gpt2'); print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.stdout.strip() == "[]", finished.stderr


def test_a_hub_id_without_network_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to the hub.\nCheck your internet connection.")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", unreachable)
    with pytest.raises(
        SlipstreamError, match="model 'someone/something' was not found locally, and could not be downloaded"
    ) as error:
        SpeculativeDecoder("someone/something")
    one_line(error)


def _t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [(_t5, "T5ForConditionalGeneration.*encoder-decoder")],
)
def test_encoder_decoder_models_are_refused_by_name(build: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        SpeculativeDecoder(build())
    one_line(error)
    with pytest.raises(UsageError, match=message):
        SpeculativeDecoder(shared("llama"), build())


def test_an_unknown_device_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"^device='abacus'; allowed: auto, cpu, cuda, cuda:N$") as error:
        SpeculativeDecoder(str(folder), device="abacus")
    one_line(error)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="device='cuda'"):
            SpeculativeDecoder(str(folder), device="cuda")


def test_fast_is_refused_with_the_reason(folder: Path) -> None:
    assert "float64" in str(unsupported(fresh("llama", dtype=torch.float64)))
    with pytest.raises(UsageError, match=r"fast=True, but LlamaForCausalLM cannot be packed: .*float64"):
        SpeculativeDecoder(fresh("llama", dtype=torch.float64), fast=True)
    assert SpeculativeDecoder(str(folder), dtype="float16", fast=True).target.packed


@pytest.mark.parametrize("fast", ["auto", False])
def test_a_model_given_by_the_caller_is_left_unchanged(fast: Any) -> None:
    model = fresh("llama")
    kinds = [type(module) for module in model.modules()]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    config = model.config.to_dict()
    decoder = SpeculativeDecoder(model, fast=fast)
    decoder.generate(PROMPT, PARAMS)
    assert not decoder.target.packed
    assert [type(module) for module in model.modules()] == kinds
    assert model.config.to_dict() == config
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert model.generate(torch.tensor([PROMPT]), max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] == 12


@pytest.mark.pairwise
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [1, 3, 4, 17])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_packed_layer_computes_what_the_linear_layer_does(
    dtype: torch.dtype, tolerance: float, width: int, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(48, 33, bias=bias, dtype=dtype)
    with torch.no_grad():
        for weight in linear.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / 7)
    x = torch.randn(2, width, 48, generator=generator).to(dtype)
    with torch.inference_mode():
        product = PackedLinear(linear)(x)
        assert product.shape == (2, width, 33) and product.dtype == dtype
        torch.testing.assert_close(product, linear(x), rtol=tolerance, atol=tolerance)
        if bias:
            linear.bias += 1
            assert not torch.allclose(product, linear(x), rtol=tolerance, atol=tolerance)


def test_a_second_decoder_over_a_packed_model_generates_the_same_text() -> None:
    model = fresh("llama")
    first = SpeculativeDecoder(model, fast=True, reproducible=False).generate(PROMPT, PARAMS)
    assert SpeculativeDecoder(model, model, reproducible=False).generate(PROMPT, PARAMS).token_ids == first.token_ids


def test_a_drafts_vocabulary_is_compared_by_its_own_tokenizer(tmp_path: Path) -> None:
    fresh("llama", vocab_size=VOCAB + 1).save_pretrained(tmp_path)
    draft_tokenizer_of_folder = tokenizer(extra=["!!"])
    draft_tokenizer_of_folder.save_pretrained(tmp_path)
    decoder = SpeculativeDecoder(shared("llama"), str(tmp_path), tokenizer=tokenizer())
    assert decoder._models.bridged is not None  # it drafts across vocabularies
    same_vocabulary = SpeculativeDecoder(
        shared("llama"), str(tmp_path), tokenizer=tokenizer(), draft_tokenizer=tokenizer()
    )
    assert same_vocabulary._models.bridged is None
    shared("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert SpeculativeDecoder(shared("llama"), str(tmp_path), tokenizer=tokenizer())._models.bridged is None


def test_a_model_of_the_cache_folder_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    shared("llama").save_pretrained(tmp_path / "little")
    assert resolve("little") == str(tmp_path / "little")
    assert [model["name"] for model in files.list_models()] == ["little"]
    assert resolve("other") == "other"  # a hub id


@pytest.mark.parametrize(
    ("device", "extra", "expected"),
    [("cuda", {}, {"": torch.device("cuda")}), ("cpu", {}, None), ("cuda", {"device_map": "auto"}, "auto")],
)
def test_weights_for_a_gpu_are_read_straight_onto_it(
    device: str, extra: dict[str, Any], expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_maps = []

    def reader_of(config: Any) -> Any:
        def from_pretrained(folder: str, *, device_map: object = None, **arguments: Any) -> Any:
            device_maps.append(device_map)
            model, report = auto_class(config).from_pretrained(folder, **arguments)
            model.is_quantized = True  # so that it is not moved afterwards
            return model, report

        return SimpleNamespace(from_pretrained=from_pretrained)

    monkeypatch.setattr(plain_models, "auto_class", reader_of)
    monkeypatch.setattr(plain_models, "device_named", torch.device)
    fresh("qwen2").save_pretrained(tmp_path)
    load_model(str(tmp_path), LoadOptions(device=device, extra=extra))
    assert device_maps == [expected]


@pytest.mark.parametrize("content", ["", '{"eos_token_id": [1,', "[]"])
def test_a_damaged_generation_config_is_refused(content: str, tmp_path: Path) -> None:
    fresh("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(SlipstreamError, match=r"generation_config\.json could not be read: "):
        load_model(str(tmp_path), LoadOptions())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_type": "video_rope"}, "rope_type='video_rope'; allowed: default, .*yarn"),
        ({"rope_type": "linear", "factor": None}, "factor=None; allowed: a number"),
        ({"rope_type": "default", "rope_theta": "10000"}, "rope_theta='10000'; allowed: a number"),
    ],
)
def test_unreadable_rotary_settings_are_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    fresh("llama").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["rope_parameters"] |= change
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(SlipstreamError, match=f"the rotary settings of config.json have {message}"):
        load_model(str(tmp_path), LoadOptions())
