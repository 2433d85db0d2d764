"""Every wrong command line is refused in one line that says what is wrong, without a traceback.

Part of the table is generated from the commands' own options, so that new options are covered.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from slipstream.apps.cli import app
from slipstream.apps.cli.command_classes import COMMANDS
from tests.support.command_line import run
from tests.support.markers import subcases

ROOT: Any = typer.main.get_command(app)
NAMES = [name for names in COMMANDS.values() for name in names]
ARGUMENTS = {"batch": ("in.jsonl", "out.jsonl"), "report": ("folder",), "generate": ("A",), "compare": ("A",)}
NUMBERS = (int, float, int | None, float | None, list[int], list[float])
TOY = ("--target", "toy")
GENERATE = ("generate", *TOY, "A")
BYTES = b"\xff\xfe".decode(errors="surrogateescape")  # as Python gives arguments that are not UTF-8
Case = tuple[tuple[str, ...], str]

WRITTEN: list[Case] = [
    # commands
    (("frobnicate",), "unknown command 'frobnicate'; allowed: generate, chat"),
    (("generat", "A"), "did you mean 'generate'?"),
    (("chatt",), "did you mean 'chat'?"),
    (("comapre",), "did you mean 'compare'?"),
    (("simulte",), "did you mean 'simulate'?"),
    (("help", "simulte"), "did you mean 'simulate'?"),
    (("help", "chat", "x"), "unexpected argument 'x'; allowed: slipstream help [COMMAND]"),
    (("models", "chek"), "did you mean 'check'?"),
    (("models", "frobnicate"), "allowed: pull, rm, check, or `slipstream models` alone"),
    (("models", "list"), "unknown command 'list'; did you mean `slipstream models`?"),
    (("models", "download", "o/m"), "did you mean `slipstream models pull o/m`?"),
    (("run", "qwen3:4b"), "unknown command 'run'; did you mean `slipstream chat --model qwen3:4b`?"),
    (("run", "qwen3:4b", "--verbose", "Why?"), "did you mean `slipstream generate --model qwen3:4b 'Why?'`?"),
    (("run",), "did you mean `slipstream chat --model MODEL`?"),
    (("pull", "qwen3:4b"), "did you mean `slipstream models pull qwen3:4b`?"),
    (("ls",), "did you mean `slipstream models`?"),
    (("show", "qwen3:4b"), "did you mean `slipstream models`?"),
    (("ps",), "did you mean `slipstream models`, or GET /api/ps of a running server?"),
    (("help", "run"), "did you mean `slipstream chat --model MODEL`?"),
    (("--versoin",), "did you mean '--version'?"),
    # arguments
    (("report",), "Missing argument 'FOLDER'"),
    (("report", "a", "b"), "Got unexpected extra argument(s) (b)"),
    (("models", "check", "toy"), "Missing argument 'draft'"),
    (("serve", "toy"), "unexpected extra argument(s) (toy)"),
    (("verify", "A prompt"), "unexpected extra argument(s) (A prompt)"),
    (("report", "nowhere"), "cannot be read: no such file or directory"),
    # options
    ((*GENERATE, "--temprature", "1"), "no such option: --temprature; did you mean '--temperature'?"),
    ((*GENERATE, "--max-token", "1"), "did you mean '--max-tokens'?"),
    ((*GENERATE, "\u2014max-tokens", "3"), "no such option: \u2014max-tokens; did you mean '--max-tokens'?"),
    ((*GENERATE, "\u2013seed=3"), "no such option: \u2013seed=3; did you mean '--seed'?"),
    ((*GENERATE, "--xyzzy"), "no such option: --xyzzy; `slipstream generate --help-all` lists them"),
    ((*GENERATE, "-z"), "no such option: -z"),
    ((*GENERATE, "--temperature"), "Option '--temperature' requires an argument"),
    ((*GENERATE, "--debug=3"), "Option '--debug' does not take a value"),
    # prompts
    (("generate", *TOY), "standard input is empty; allowed: a text"),
    (("generate", *TOY, ""), "prompt is empty; allowed: a text"),
    (("generate", *TOY, "-p", "  "), "prompt is empty; allowed: a text"),
    (("generate", *TOY, "-", "-"), "prompt - is given twice"),
    ((*GENERATE, "--prompt-file", "x.txt"), "prompt 'A' with --prompt-file 'x.txt'; allowed: one of the two"),
    (("generate", *TOY, "--prompt-file", "absent.txt"), "'absent.txt' cannot be read: no such file or directory"),
    (("generate", *TOY, "--prompt-file", "-"), "standard input is empty"),
    ((*GENERATE, "--limit", "1"), "--category and --limit need --prompt-file"),
    ((*GENERATE, "--system", "s", "--raw"), "--system with --raw"),
    ((*GENERATE, "--system", "Be brief."), "'toy' lacks"),
    (("generate", *TOY, "-p", BYTES), "prompt has '\\udcff' at character 0; allowed: valid Unicode"),
    ((*GENERATE, "--system", BYTES), "--system has '\\udcff' at character 0; allowed: valid Unicode"),
    ((*GENERATE, "--stop", BYTES), "allowed: non-empty strings of valid Unicode"),
    ((*GENERATE, "--bad-words", BYTES), "allowed: non-empty strings of valid Unicode"),
    ((*GENERATE, "--answer-start", "s", "--raw"), "--answer-start with --raw"),
    ((*GENERATE, "--answer-start", "s"), "--answer-start needs a chat template, which 'toy' lacks"),
    ((*GENERATE, "--chat-template-kwargs", "x"), "--chat-template-kwargs 'x' is not JSON"),
    ((*GENERATE, "--chat-template-kwargs", "[1]"), "chat_template_kwargs=[1]; allowed: a dictionary"),
    ((*GENERATE, "--chat-template-kwargs", '{"a": 1}'), "chat_template_kwargs with a text without the chat template"),
    (("batch", "in.jsonl", "o.jsonl", *TOY, "--chat-template-kwargs", "[1]"), "chat_template_kwargs=[1]; allowed: a d"),
    (("batch", "-", "out.jsonl", *TOY), "'-' cannot be read: standard input is not read"),
    (("batch", "in.jsonl", "out.parquet", *TOY), "'out.parquet' is a Parquet file; allowed: JSON lines"),
    (("bench", *TOY, "--category", "code_edit"), "is not in the built-in prompts; allowed: "),
    (("bench", *TOY, "--category", "code edi"), "did you mean 'code edit'?"),
    (("verify", *TOY, "--category", "storry"), "did you mean 'story'?"),
    # sampling
    ((*GENERATE, "--temperature", "-1"), "temperature=-1.0; allowed: a number, 0 or more"),
    ((*GENERATE, "--temperature", "warm"), "--temperature 'warm'; allowed: a number"),
    ((*GENERATE, "--temperature", "nan"), "temperature=nan; allowed: a number, 0 or more"),
    ((*GENERATE, "--top-p", "1.5"), "top_p=1.5; allowed: a number above 0, up to 1"),
    ((*GENERATE, "--min-p", "2"), "min_p=2.0; allowed: a number from 0 to 1"),
    ((*GENERATE, "--top-k", "-1"), "top_k=-1; allowed: a whole number, 0 or more"),
    ((*GENERATE, "--top-k", "1.5"), "--top-k '1.5'; allowed: a whole number"),
    ((*GENERATE, "--repetition-penalty", "0"), "repetition_penalty=0.0; allowed: a number above 0"),
    ((*GENERATE, "--max-tokens", "0"), "max_tokens=0; allowed: a whole number, 1 or more"),
    ((*GENERATE, "--min-tokens", "3000"), "min_tokens=3000; allowed: 0 to max_tokens (1024)"),
    ((*GENERATE, "--seed", "-1"), "seed=-1; allowed: a whole number, 0 or more"),
    ((*GENERATE, "--n", "3"), "n=3; allowed: 1 with temperature=0"),
    ((*GENERATE, "--stop", ""), "stop"),
    ((*GENERATE, "--logit-bias", "5"), "--logit-bias '5'; allowed: TOKEN_ID=NUMBER"),
    ((*GENERATE, "--stop-token-ids", "-4"), "stop_token_ids"),
    ((*GENERATE, "--logprobs", "-1"), "logprobs=-1; allowed: a whole number, 0 or more"),
    # decoder
    ((*GENERATE, "--drafter", "ngarm"), "did you mean 'ngram'?"),
    ((*GENERATE, "--drafter", "sufix"), "did you mean 'suffix'?"),
    ((*GENERATE, "--drafter", "magic"), "drafter='magic'; allowed: auto, cross_vocabulary"),
    ((*GENERATE, "--drafter", "magic"), "token_recycling, MODULE:NAME, or in Python a Drafter object"),
    ((*GENERATE, "--drafter", "auto:3"), "drafter='auto:3'; allowed: 'auto' without an argument"),
    ((*GENERATE, "--drafter", "none:"), "drafter='none:'; allowed: 'none' without an argument"),
    ((*GENERATE, "--drafter", "ngram:"), "drafter='ngram:'; allowed: ngram[:N]"),
    (("bench", *TOY, "--arms", "none,auto:3@4"), "drafter='auto:3'; allowed: 'auto' without an argument"),
    ((*GENERATE, "--drafter", "model"), "needs a draft model"),
    ((*GENERATE, "--acceptance", "typcal"), "did you mean 'typical'?"),
    ((*GENERATE, "--num-draft-tokens", "heuristc:4"), "did you mean 'heuristic'?"),
    ((*GENERATE, "--acceptance", "rejecton"), "did you mean 'rejection'?"),
    ((*GENERATE, "--acceptance", "topk"), "acceptance='topk'; allowed: "),
    ((*GENERATE, "--acceptance", "topk:0"), "allowed: topk:K with a whole number K, 1 or more"),
    ((*GENERATE, "--num-draft-tokens", "many"), "num_draft_tokens='many'; allowed"),
    ((*GENERATE, "--num-draft-tokens", "-2"), "num_draft_tokens=-2"),
    ((*GENERATE, "--num-draft-tokens=--5"), "num_draft_tokens='--5'"),
    ((*GENERATE, "--drafter", "none", "--num-draft-tokens", "4"), "num_draft_tokens=4 with drafter='none'"),
    ((*GENERATE, "--dtype", "float61"), "did you mean 'float16'?"),
    ((*GENERATE, "--dtype", "float32"), "the toy model has no weights"),
    ((*GENERATE, "--dtype", "int3"), "dtype='int3'; allowed: auto, bfloat16"),
    ((*GENERATE, "--draft-dtype", "int5"), "draft_dtype='int5'; allowed"),
    ((*GENERATE, "--draft-dtype", "in8"), "did you mean 'int8'?"),
    ((*GENERATE, "--quantize", "int44"), "did you mean 'int4'?"),
    ((*GENERATE, "--fast", "yes"), "fast='yes'; allowed: 'auto', True, False"),
    ((*GENERATE, "--max-batch-size", "0"), "max_batch_size=0; allowed: a whole number from 1 to 4096"),
    ((*GENERATE, "--draft-context", "5"), "draft_context=5; allowed"),
    ((*GENERATE, "--load-options", "{"), "is not JSON"),
    ((*GENERATE, "--config", "absent.json"), "'absent.json' cannot be read: no such file or directory"),
    ((*GENERATE, "--config", "typo.json"), "has the unknown key 'drafterr'; allowed: "),
    ((*GENERATE, "--config", "typo.json"), "did you mean 'drafter'?"),
    (("generate", "A", "--target", "/no/such/folder"), "'/no/such/folder' is not a folder"),
    (("generate", "A", "--model", "absent.gguf"), "'absent.gguf' does not exist"),
    # structure
    ((*GENERATE, "--regex", "["), "unclosed character class"),
    ((*GENERATE, "--json-schema", "absent.json"), "'absent.json' cannot be read: no such file or directory"),
    ((*GENERATE, "--json-object", "--regex", "a"), "allowed: one of json_schema"),
    ((*GENERATE, "--whitespace", "spaced"), "--whitespace 'spaced' alone"),
    # output
    ((*GENERATE, "--json", 300 * "x"), "x' cannot be written: file name too long"),
    # measuring
    (("compare", *TOY, "A", "--repeats", "0"), "--repeats '0'; allowed: 1 or more"),
    (("bench", *TOY, "--batch-sizes", "0"), "--batch-sizes '0'; allowed: different whole numbers"),
    (("bench", *TOY, "--arms", "none,ngarm"), "ngarm"),
    (("bench", *TOY, "--plan", "typo.json"), "did you mean 'drafter'?"),
    (("tune", *TOY, "--longest", "99"), "--longest '99'; allowed: 64 or less"),
    (("verify", *TOY, "--budget", "0"), "--budget '0'; allowed: 1 or more"),
    (
        ("simulate", "--target-params", "eight"),
        "--target-params 'eight'; allowed: a number, 0 or more, which may end in",
    ),
    (("serve", "--port", "8000", "--port", "high"), "--port 'high'; allowed: a whole number"),
    (("simulate", "--stats", "absent.json", *TOY), "'absent.json' cannot be read: no such file or directory"),
    (("simulate", "--arm", "x"), "needs --stats FOLDER"),
    # training
    (("train", *TOY), "--out is missing; allowed: --out FOLDER"),
    (("train", *TOY, "--out", "x", "--tokens", "many"), "--tokens 'many'; allowed: a number from 1000 on, e.g. 500k"),
    (("train", *TOY, "--out", "x", "--tokens", "0.5k"), "--tokens '0.5k'; allowed: a number from 1000 on"),
    (("train", *TOY, "--out", "x", "--hours", "0"), "--hours 0; allowed: a number above 0"),
    (("train", *TOY, "--out", "x", "--steps", "0"), "--steps '0'; allowed: 1 or more"),
    (("train", *TOY, "--out", "x", "--prompts", "absent.txt"), "--prompts 'absent.txt' cannot be read"),
    (("train", *TOY, "--out", "x", "--prompts", "absent.jsonl"), "'absent.jsonl' cannot be read"),
    (("train", *TOY, "--out", "x"), "--model 'toy' has no hidden states that a head could read; allowed: a model of"),
    (("train", *TOY, "--out", "x", "--drafter", "ngram"), "no such option: --drafter"),
    # empty values, and files that are not what they should be
    ((*GENERATE, "--json", ""), "--json ''; allowed: --json FILE"),
    (("serve", *TOY, "--api-key-file="), "--api-key-file ''; allowed: --api-key-file FILE"),
    ((*GENERATE, "--json", "loop"), "--json 'loop' cannot be written: "),
    ((*GENERATE, "--config", "deep.json"), "config file 'deep.json' cannot be read: it is nested too deeply"),
    ((*GENERATE, "--config", "digits.json"), "config file 'digits.json' cannot be read: exceeds the limit"),
    (("bench", "--plan", "deep.json"), "plan 'deep.json' cannot be read: it is nested too deeply"),
    (("generate", *TOY, "--prompt-file", "category.jsonl"), "line 1: category=['x']; allowed: a non-empty text"),
    (("batch", "in.jsonl", "/dev/full", *TOY), "the output '/dev/full' cannot be written: it is not an ordinary file"),
    (("batch", "in.jsonl", "o.jsonl", *TOY, "--json", "o.jsonl"), "'o.jsonl' is OUT and --json; allowed: two files"),
    (("generate", *TOY, "--prompt-file", "p", "--json", "./p"), "'p' is --prompt-file and --json; allowed: two files"),
    (("batch", "in.jsonl", "-", *TOY), "output='-'; allowed: the name of a file"),
    (("simulate", "--alpha", "1.5"), "--alpha '1.5'; allowed: 1 or less"),
    ((*GENERATE, "--thinking-token-budget", "5"), "thinking_token_budget=5, but this model writes no thoughts"),
    *(
        (("launch", "claude", "--print", f"--url={url}"), f"--url {url!r}; allowed: an address like http://")
        for url in (
            "x",
            "localhost:8000",
            "ftp://x",
            "http://:80",
            "http://[",
            "http://a b",
            "http://x:port",
            "http://x:99999",
        )
    ),
    # serving
    (("serve", "--host", "0.0.0.0"), "0.0.0.0"),
    (("serve", "--port", "70000"), "port=70000; allowed: a whole number from 0 to 65535"),
    (("serve", "--queue-timeout", "0"), "queue_timeout=0.0; allowed: seconds above 0"),
]


def options() -> Iterator[tuple[str, str, Any]]:
    """Every option of all commands once: a command that has it, its longest flag, the option."""
    seen: set[str] = set()
    for name in NAMES:
        for option in ROOT.commands[name].params:
            flag = max(option.opts, key=len)
            if option.param_type_name == "option" and flag not in seen:
                seen.add(flag)
                yield name, flag, option


def numbers() -> Iterator[Case]:
    """Every option that takes a number, given a word."""
    for name, flag, option in options():
        kind = option.type_descriptor
        if kind.annotation in NUMBERS and kind.parameter_info.parser is None:
            yield (name, *ARGUMENTS.get(name, ()), flag, "abc"), f"{flag} 'abc'; allowed: a"


def misspelt() -> Iterator[Case]:
    """Every long option with a letter left out."""
    for name, flag, _ in options():
        if len(flag) > 8:
            wrong = flag[:5] + flag[6:]
            yield (name, *ARGUMENTS.get(name, ()), wrong), f"no such option: {wrong}; did you mean '--"


def missing_values() -> Iterator[Case]:
    """Every option that takes a value, without one at the end of the line."""
    for name, flag, option in options():
        if not option.is_flag:
            yield (name, *ARGUMENTS.get(name, ()), flag), f"Option '{flag}' requires an argument"


GENERATED = [*numbers(), *misspelt(), *missing_values()]


def test_the_table_of_wrong_command_lines_is_large_enough() -> None:
    assert len({arguments for arguments, _ in WRITTEN}) >= 100
    assert len(list(numbers())) >= 30 and len(list(misspelt())) >= 60 and len(list(missing_values())) >= 70


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that the command lines are typed in; standard input is empty."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typo.json").write_text('{"drafterr": "none"}')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "digits.json").write_text('{"max_batch_size": ' + "9" * 5000 + "}")
    (tmp_path / "category.jsonl").write_text('{"prompt": "a", "category": ["x"]}')
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "A heron"}\n')


@subcases("arguments,message", [*WRITTEN, *GENERATED], ids=lambda value: ascii(" ".join(value))[-50:])
def test_a_wrong_command_line_is_refused_in_one_line(
    folder: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, out, err = run(capsys, monkeypatch, *arguments)
    lines = err.splitlines()
    assert code in (1, 2) and not out and "Traceback" not in err
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], err
    assert len(lines[0]) < 700
