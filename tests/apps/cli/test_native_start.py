"""`slipstream generate` starts GGUF files and known checkpoints without libraries that take seconds to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gguf_architectures import CASES, architecture, model_of, write_case
from tests.support.gguf_files import write_chat_model
from tests.support.markers import mostly_exhaustive, needs_avx2
from tests.support.tiny_models import byte_tokenizer

pytest.importorskip("gguf")
pytestmark = needs_avx2
SLOW = ["transformers", "huggingface_hub", "fastapi", "starlette", "sympy", "torch._dynamo", "gguf"]
PROGRAM = f"""
import json, sys
from slipstream.apps.cli import main
sys.argv = ["slipstream", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    print(json.dumps([ended.code or 0, [name for name in {SLOW} if name in sys.modules]]), file=sys.stderr)
"""


def generate(*arguments: str) -> tuple[str, list[Any]]:
    """The command's output, and its exit code with the slow libraries that it imported."""
    command = [sys.executable, "-c", PROGRAM, "generate", "Why?", "--max-tokens", "6", "--seed", "1", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    return run.stdout, json.loads(run.stderr.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_exhaustive(CASES, "qwen3moe", "qwen35moe", "gemma4-small"))
def test_a_gguf_file_needs_no_transformers(name: str, tmp_path: Path) -> None:
    write_case(tmp_path / "model.gguf", architecture(name), CASES[name], "Q8_0")
    text, outcome = generate("-m", str(tmp_path / "model.gguf"))
    assert outcome == [0, []] and text.rstrip("\n")  # of random tokens, some of which are white space


@pytest.mark.slow
def test_a_draft_needs_no_transformers(tmp_path: Path) -> None:
    target, draft = (
        write_chat_model(tmp_path / "target.gguf"),
        write_chat_model(tmp_path / "draft.gguf", num_hidden_layers=1),
    )
    text, outcome = generate("-m", target, "--draft", draft, "--temperature", "0.8")
    assert outcome == [0, []] and text.strip()


@pytest.mark.slow
def test_a_checkpoint_needs_transformers_only_once(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seed in (("target", 0), ("draft", 1)):
        settings = {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 2}
        model = model_of(replace(CASES["qwen3"], settings=CASES["qwen3"].settings | settings).config(), seed)
        model.to(torch.bfloat16).save_pretrained(tmp_path / name)
        byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}").save_pretrained(tmp_path / name)
    command = ("-m", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--temperature", "0.8")
    (text, outcome), *later = (generate(*command) for _ in range(2))
    assert outcome[0] == 0 and "transformers" in outcome[1] and text.rstrip("\n")
    assert later == [(text, [0, []])]
    file = tmp_path / "target" / "generation_config.json"
    file.write_text(file.read_text())  # a file that changes is read again
    assert "transformers" in generate(*command)[1][1]
