"""`slipstream models` lists, downloads, removes and checks models; `--draft` with another vocabulary."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models

from slipstream.apps.cli.models import PAIRS
from slipstream.durable_files import locked
from slipstream.models.weights.default_model import WHEEL
from slipstream.models.weights.named_models import short_names
from tests.support.command_line import run
from tests.support.gguf_files import write_chat_model
from tests.support.hub_server import connect, hub_server
from tests.support.tiny_models import fresh
from tests.support.tiny_models import tokenizer as spoken
from tests.support.vocabularies import TEXT, speaking, tokenizer

STORY = "\n".join(TEXT)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for kind in ("bytes", "sentencepiece"):
        path = tmp_path_factory.mktemp(kind)
        speaking(kind).save_pretrained(path)
        tokenizer(kind).save_pretrained(path)
        made[kind] = str(path)
    return made


@pytest.mark.slow
def test_models_check_says_how_vocabularies_are_bridged_and_what_it_costs(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, folders: dict[str, str], tmp_path: Path
) -> None:
    file, text = tmp_path / "report.json", tmp_path / "story.txt"
    text.write_text(STORY)
    check = ("models", "check", folders["bytes"], folders["sentencepiece"])
    code, out, err = run(capsys, monkeypatch, *check, "--text", str(text), "--json", str(file))
    report = json.loads(file.read_text())
    assert code == 0 and err == "" and out.startswith("Works, through text")
    assert f"about {1 - report['bridge']['kept']:.1%} extra rejections." in out
    assert report["usable"] and 0.5 < report["bridge"]["kept"] <= 1 and report["bridge"]["per_step"] > 0
    assert f"only the {report['bridge']['shared']} tokens that both have" in " ".join(out.split())
    assert run(capsys, monkeypatch, *check, "--json", str(file))[0] == 0
    assert json.loads(file.read_text())["bridge"] != report["bridge"]  # another text, another estimate


def test_models_check_warns_of_a_draft_model_that_is_larger_than_its_target(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, layers in (("small", 1), ("large", 3)):
        fresh("llama", num_hidden_layers=layers).save_pretrained(tmp_path / name)
        spoken().save_pretrained(tmp_path / name)
    small, large, file = str(tmp_path / "small"), str(tmp_path / "large"), tmp_path / "report.json"
    code, out, _ = run(capsys, monkeypatch, "models", "check", small, large, "--json", str(file))
    verdict, warning = out.splitlines()
    assert code == 0 and verdict.startswith("Works, but hardly saves time: ")
    assert warning.startswith(f"Warning: draft model {large!r} is larger than its target, with about ")
    assert json.loads(file.read_text())["notes"] == [warning]
    code, out, _ = run(capsys, monkeypatch, "models", "check", large, small)
    assert code == 0 and out.startswith("Works: ") and "Warning" not in out


def test_an_unusable_pair_is_one_line_that_names_both_models(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, folders: dict[str, str], tmp_path: Path
) -> None:
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##s": 2}, unk_token="[UNK]"))
    speaking("bytes").save_pretrained(tmp_path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]").save_pretrained(tmp_path)
    for command in (("models", "check", folders["bytes"], str(tmp_path)),):
        code, _, err = run(capsys, monkeypatch, *command)
        assert code == 1 and len(err.strip().splitlines()) == 1 and "WordPiece" in err
        assert folders["bytes"] in err and str(tmp_path) in err
    options = ("generate", "-p", "a", "--target", folders["bytes"], "--draft", str(tmp_path), "--reproducible", "false")
    code, _, err = run(capsys, monkeypatch, *options)
    assert code == 2 and "WordPiece" in err and folders["bytes"] in err and str(tmp_path) in err


@pytest.mark.slow
def test_a_draft_model_with_another_vocabulary_leaves_the_text_unchanged(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, folders: dict[str, str], tmp_path: Path
) -> None:
    texts = []
    for number, drafting in enumerate([(), ("--draft", folders["sentencepiece"], "--num-draft-tokens", "3")]):
        file = tmp_path / f"{number}.json"
        options = ("--target", folders["bytes"], "--max-tokens", "12", "--reproducible", "false", "--json", str(file))
        code, _, err = run(capsys, monkeypatch, "generate", "-p", "The heron", *drafting, *options)
        assert code == 0, err
        texts.append(json.loads(file.read_text())["results"][0]["token_ids"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["a b", "-x", "a..b", "x/", "a" * 120])
def test_an_invalid_model_name_has_exit_code_2(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str, folders: dict[str, str]
) -> None:
    code, _, err = run(capsys, monkeypatch, "models", "check", "--", folders["bytes"], name)
    assert code == 2 and len(err.strip().splitlines()) == 1 and repr(name) in err


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slipstream's cache with a model and the file it was converted from, and Hugging Face's with another model."""
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "own"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    made = tmp_path / "own" / "qwen"
    made.mkdir(parents=True)
    (made / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    (made / "model.safetensors").write_bytes(bytes(2_000_000))
    (tmp_path / "own" / "qwen.gguf").write_bytes(b"GGUF")
    for file in made.iterdir():
        os.utime(file, (time.time() - 7200,) * 2)
    repository, commit = tmp_path / "hub" / "models--org--small", "a" * 40
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs" / "b").write_bytes(bytes(1_500_000_000 // 1000))
    (repository / "snapshots" / commit / "model.safetensors").symlink_to(repository / "blobs" / "b")
    return tmp_path


def test_standard_output_holds_the_json_alone(capsys: Any, monkeypatch: pytest.MonkeyPatch, caches: Path) -> None:
    code, out, err = run(capsys, monkeypatch, "models", "--json", "-")
    assert code == 0 and [model["name"] for model in json.loads(out)["models"]] == ["org/small", "qwen"]
    assert "NAME " in err and "toy " in err


def test_the_list_has_both_caches_and_the_toy_under_a_header(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, caches: Path
) -> None:
    code, out, err = run(capsys, monkeypatch, "models", "--json", str(caches / "models.json"))
    assert code == 0 and [line.split() for line in out.splitlines()] == [
        ["NAME", "SIZE", "MODIFIED", "CACHE"],
        ["org/small", "2", "MB", "moments", "ago", "hugging", "face"],
        ["qwen", "2", "MB", "2", "hours", "ago", "slipstream"],
        ["toy", "-", "-", "built", "in"],
    ]
    assert "for --model and --draft" in err and "Qwen/Qwen3-8B Qwen/Qwen3-0.6B" in " ".join(err.split())
    report = json.loads((caches / "models.json").read_text())
    assert [model["architecture"] for model in report["models"]] == ["", "Qwen2ForCausalLM"]


def test_removing_a_model_removes_all_of_it_and_nothing_else(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, caches: Path
) -> None:
    code, _, err = run(capsys, monkeypatch, "models", "rm", "qwem")
    assert code == 2 and "did you mean qwen?" in err and len(err.splitlines()) == 1
    code, _, err = run(capsys, monkeypatch, "models", "rm", "qwen")
    assert code == 0 and err.startswith("removed qwen (2 MB) from ")
    assert not list((caches / "own").iterdir()) and (caches / "hub" / "models--org--small").exists()
    assert run(capsys, monkeypatch, "models", "rm", "org/small")[0] == 0
    assert not (caches / "hub" / "models--org--small").exists()
    for name in ("../own", "toy", "", "."):
        assert run(capsys, monkeypatch, "models", "rm", name)[0] == 2
    assert (caches / "own").is_dir()


def test_pull_names_what_cannot_be_pulled_and_skips_duplicate_formats(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, caches: Path
) -> None:
    for name, why in (
        ("toy", "is built in"),
        ("qwen", "is on this machine already"),
        (str(caches), "already"),
        ("absent.gguf", "does not exist"),
    ):
        code, _, err = run(capsys, monkeypatch, "models", "pull", name)
        assert code == 2 and why in err
    code, _, err = run(capsys, monkeypatch, "models", "pull", "org/absent")  # tests have no network
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == 1 and len(errors) == 1 and "org/absent" in errors[0] and "Traceback" not in err
    asked, folder = dict[str, Any](), caches / "pulled"
    folder.mkdir()

    def download(repository: str, ignore_patterns: Sequence[str] = (), allow_patterns: Sequence[str] = ("*",)) -> str:
        asked[repository] = ignore_patterns or allow_patterns
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    code, _, err = run(capsys, monkeypatch, "models", "pull", "org/x")
    assert code == 1 and "error: model 'org/x' has no weights in safetensors files; allowed:" in err
    for file in ("pytorch_model-00001-of-00002.bin", "model.safetensors"):
        (folder / file).touch()
        code, _, err = run(capsys, monkeypatch, "models", "pull", "org/absent")
        assert code == 0 and err.endswith(f"org/absent is in {folder}\n")
    assert "*.gguf" in asked["org/absent"] and "*.safetensors" not in asked["org/absent"]


def test_pairs_that_fit_together_fit_on_a_line_of_80_columns(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    code, _, err = run(capsys, monkeypatch, "models")
    pairs = [line for line in err.splitlines() if "/" in line]
    assert code == 0 and len(pairs) == len(PAIRS) and max(map(len, pairs)) <= 80


def test_short_names_say_whether_they_fit_the_memory(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MEMORY", "5")
    file = tmp_path / "models.json"
    code, _, err = run(capsys, monkeypatch, "models", "--json", str(file))
    rows = {line.split()[0]: line for line in err.splitlines() if line.startswith("  ") and ":" in line.split()[0]}
    assert code == 0 and rows.keys() == short_names().keys() and max(map(len, rows.values())) <= 80
    assert "(memory here: 5 GB)" in err
    assert rows["qwen3:4b"].split()[1:] == ["2.5", "GB", "qwen3:0.6b", "5", "GB", "yes"]
    assert rows["qwen3:8b"].endswith("no") and rows["qwen3:1.7b"].split()[3:] == ["-", "3", "GB", "yes"]
    names = {row["name"]: row for row in json.loads(file.read_text())["names"]}
    assert names["qwen3:8b"]["repository"] == "Qwen/Qwen3-8B-GGUF" and names["qwen3:8b"]["gigabytes_needed"] > 6


def test_pulling_a_short_name_pulls_its_draft_model_and_rm_removes_its_file(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, caches: Path
) -> None:
    rows = [short_names()[name] for name in ("qwen3:8b", "qwen3:0.6b")]
    with hub_server({row.repository: {row.file.upper(): b"GGUF", "a.md": b""} for row in rows}) as hub:  # renamed since
        connect(monkeypatch, hub, str(caches / "hub"))
        code, _, err = run(capsys, monkeypatch, "models", "pull", "Qwen3:8B")
        assert code == 0 and len(hub.asked("GET", "/cdn/")) == 2
        last = [line.partition(" in ")[0] for line in err.splitlines() if " in " in line]
        assert last == ["Qwen3:8B is", "qwen3:0.6b, its draft model, is"]
    code, _, err = run(capsys, monkeypatch, "models", "rm", "qwen3:8b")
    assert code == 0 and err.startswith("removed Qwen/Qwen3-8B-GGUF:Q4_K_M (1 MB) from ")
    assert not (caches / "hub" / "models--Qwen--Qwen3-8B-GGUF").exists()
    code, _, err = run(capsys, monkeypatch, "models", "rm", "qwen3:8b")
    assert code == 2 and "'qwen3:8b' is not in the caches" in err


@pytest.mark.parametrize("typed", ["o/m-GGUF:Q4_K_M", "o/m-GGUF", "o/m-GGUF:q4_k_m", "o/m-GGUF:b-Q4_K_M.gguf"])
def test_rm_removes_the_named_file_of_a_repository_alone(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, caches: Path, typed: str
) -> None:
    folder = caches / "hub" / "models--o--m-GGUF"
    for commit in ("a" * 40, "b" * 40):  # two versions share a content
        (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "blobs").mkdir()
    for name, content, size in (("b-Q4_K_M.gguf", "q4", 3), ("b-Q8_0.gguf", "q8", 5), ("config.json", "c", 2)):
        (folder / "blobs" / content).write_bytes(bytes(size * 1_000_000))
        for snapshot in (folder / "snapshots").iterdir():
            (snapshot / name).symlink_to(folder / "blobs" / content)
    (folder / "blobs" / "q5.slipstream").write_bytes(bytes(7_000_000))
    (folder / "blobs" / "q6.abc.incomplete").write_bytes(bytes(1_000_000))
    _, out, _ = run(capsys, monkeypatch, "models")
    listed = {line.split()[0]: " ".join(line.split()[1:3]) for line in out.splitlines() if line.startswith("o/m")}
    names = ("o/m-GGUF", "o/m-GGUF:Q4_K_M", "o/m-GGUF:Q8_0", "o/m-GGUF:unfinished")
    assert listed == dict(zip(names, ("2 MB", "3 MB", "5 MB", "8 MB"), strict=True))
    if typed == "o/m-GGUF":  # with other files, the name alone means these
        assert run(capsys, monkeypatch, "models", "rm", typed)[0] == 0
    code, _, err = run(capsys, monkeypatch, "models", "rm", typed)
    assert code == 0 and err.startswith("removed o/m-GGUF:Q4_K_M (3 MB) from ")
    assert {blob.name for blob in (folder / "blobs").iterdir()} >= {"q8", "q5.slipstream"}
    assert not (folder / "blobs" / "q4").exists() and not list(folder.rglob("b-Q4_K_M.gguf"))
    held = locked(caches / "hub" / ".locks" / folder.name / "q5.lock")
    assert held is not None
    code, _, err = run(capsys, monkeypatch, "models", "rm", "o/m-GGUF:unfinished")
    assert code == 1 and "is being downloaded by another process" in err
    held.release()
    assert run(capsys, monkeypatch, "models", "rm", "o/m-GGUF:unfinished")[0] == 0
    run(capsys, monkeypatch, "models", "rm", "o/m-GGUF")
    partial = caches / "own" / f"{WHEEL}.partial"
    partial.write_bytes(bytes(4_000_000))
    assert "smollm2:unfinished 4 MB" in " ".join(run(capsys, monkeypatch, "models")[1].split())
    assert run(capsys, monkeypatch, "models", "rm", "smollm2:unfinished")[0] == 0 and not partial.exists()
    assert run(capsys, monkeypatch, "models", "rm", "o/m-GGUF:Q8_0")[0] == 0 and not folder.exists()


def test_models_check_takes_names_of_the_hub(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    content = Path(write_chat_model(tmp_path / "a.gguf")).read_bytes()
    with hub_server({"o/m-GGUF": {"m-Q8_0.gguf": content}}) as hub:
        connect(monkeypatch, hub, str(tmp_path / "hub"))
        code, out, err = run(capsys, monkeypatch, "models", "check", str(tmp_path / "a.gguf"), "o/m-GGUF:q8_0")
    assert code == 0 and out.startswith("Works"), err
