"""The command line: output, exit codes, one clear line for every mistake."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from slipstream import SamplingParams, SpeculativeDecoder, __version__
from slipstream.apps.cli import compare, demo
from slipstream.config import DecoderConfig
from tests.support import tiny_models
from tests.support.command_line import run
from tests.support.wrong_acceptance_rules import load_wrong_rule

TOY = ("--target", "toy")
PROMPT = ("-p", "The heron")
LENGTH = ("--num-draft-tokens", "3")  # on a busy machine "auto" may decide that the toy's drafts do not pay


def test_generate_writes_the_text_and_the_full_result(capsys, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    code, out, err = run(capsys, monkeypatch, "generate", *TOY, *PROMPT, "--max-tokens", "40", "--json", str(file))
    result = json.loads(file.read_text())["results"][0]
    assert code == 0 and out.strip() == result["text"].strip() and "tok/s" in err
    assert result["stats"]["num_output_tokens"] == len(result["token_ids"]) == 40


def test_generate_runs_several_prompts_as_a_batch_in_order(capsys, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    flags = ("--max-tokens", "20", "--json", str(file))
    code, _, _ = run(capsys, monkeypatch, "generate", *TOY, *PROMPT, "-p", "A sparrow", *flags)
    batch = [r["token_ids"] for r in json.loads(file.read_text())["results"]]
    alone = []
    for prompt in ("The heron", "A sparrow"):
        assert run(capsys, monkeypatch, "generate", *TOY, "-p", prompt, *flags)[0] == 0
        alone += [r["token_ids"] for r in json.loads(file.read_text())["results"]]
    assert code == 0 and batch == alone


def test_generate_writes_n_texts_with_the_seeds_that_repeat_them(capsys, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    flags = ("--max-tokens", "12", "--temperature", "1.5", "--json", str(file))
    more = ("-p", "A sparrow", "--n", "3", "--seed", "5")
    code, out, err = run(capsys, monkeypatch, "generate", *TOY, *PROMPT, *more, *flags)
    results = json.loads(file.read_text())["results"]
    texts = [text for result in results for text in (result, *result["alternatives"])]
    assert code == 0 and len(texts) == 6 and len({tuple(text["token_ids"]) for text in texts[:3]}) == 3
    assert "6 texts" in err
    for number, text in zip(("1.1", "1.2", "1.3", "2.1", "2.2", "2.3"), texts, strict=True):
        assert f"--- {number}, seed {text['seed']}: " in out and text["text"].strip() in out
    params = SamplingParams(max_tokens=12, temperature=1.5, n=3, seed=5)
    expected = SpeculativeDecoder("toy").generate("The heron", params)
    assert [text["token_ids"] for text in texts[:3]] == [
        result.token_ids for result in (expected, *expected.alternatives)
    ]
    assert run(capsys, monkeypatch, "generate", *TOY, *PROMPT, "--seed", str(texts[2]["seed"]), *flags)[0] == 0
    assert json.loads(file.read_text())["results"][0]["token_ids"] == texts[2]["token_ids"]


@pytest.mark.parametrize("prompts", [(), ("-p", "A sparrow")])
def test_generate_says_the_seed_that_repeats_a_sampled_text(
    capsys, monkeypatch, prompts: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    flags = ("--max-tokens", "12", "--json", str(file))
    _, out, err = run(capsys, monkeypatch, "generate", *TOY, *PROMPT, *prompts, *flags, "--temperature", "1.5")
    (first, *_) = json.loads(file.read_text())["results"]
    assert f"seed {first['seed']}" in (out if prompts else err)
    again = ("--temperature", "1.5", "--seed", str(first["seed"]))
    run(capsys, monkeypatch, "generate", *TOY, *PROMPT, *flags, *again)
    assert json.loads(file.read_text())["results"][0]["token_ids"] == first["token_ids"]
    _, out, err = run(capsys, monkeypatch, "generate", *TOY, *PROMPT, *prompts, *flags)
    assert "seed" not in out + err


@pytest.mark.parametrize("more", [(), ("-p", "A sparrow")])
def test_generate_reports_logprobs(capsys, monkeypatch, more: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    flags = ("--max-tokens", "5", "--logprobs", "2", "--json", str(file))
    code, _, err = run(capsys, monkeypatch, "generate", *TOY, *PROMPT, *more, *flags)
    result = json.loads(file.read_text())["results"][0]
    expected = SpeculativeDecoder("toy").generate("The heron", SamplingParams(max_tokens=5, logprobs=2)).to_dict()
    assert code == 0 and result["token_ids"] == expected["token_ids"]
    assert result["logprobs"] == json.loads(json.dumps(expected["logprobs"]))
    assert f"{result['logprobs'][0]['logprob']:.3f}" in err


def test_compare_reports_parity_and_statistics(capsys, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ("compare", *TOY, "--draft", "toy:3", *LENGTH, *PROMPT, "-p", "A fish", "--batch", "--json", str(file))
    code, out, _ = run(capsys, monkeypatch, *arguments)
    report = json.loads(file.read_text())
    assert code == 0 and "identical" in out
    assert report["summary"]["arms"]["speculative"]["identical"] == 2 == report["summary"]["batch"]["identical"]
    assert report["summary"]["stats"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [(("--frequency-penalty", "1"), "frequency_penalty=1.0; allowed"), (TOY, "needs a Hugging Face model")],
)
def test_compare_refuses_what_hugging_face_cannot_do_before_loading_models(
    capsys, monkeypatch, flags: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(compare, "load_decoder", lambda *_: pytest.fail("models were loaded"))
    code, _, err = run(capsys, monkeypatch, "compare", *PROMPT, "--hf", *flags)
    assert code == 2 and message in " ".join(err.split())


@pytest.mark.slow
def test_compare_fails_on_a_lossless_rule_that_changes_the_text(capsys, monkeypatch) -> None:
    right = compare.load_decoder
    wrong = load_wrong_rule("first-mismatch-kept")
    monkeypatch.setattr(compare, "load_decoder", lambda *args: right(*args).using(acceptance=wrong))
    code, _, err = run(capsys, monkeypatch, "compare", *TOY, "--draft", "toy:2", *LENGTH, *PROMPT)
    assert code == 1 and "differ from plain decoding" in err


def test_lossy_rules_are_announced(capsys, monkeypatch, caplog) -> None:
    code, _, _ = run(capsys, monkeypatch, "generate", *TOY, "--draft", "toy:2", *PROMPT, "--acceptance", "topk:5")
    assert code == 0 and "topk:5 is lossy" in caplog.text


QUICK = ("--num-draft-tokens", "2", "--max-tokens", "8", "--budget", "1")  # of `verify`


@pytest.mark.slow
def test_verify_calls_a_lossy_rule_lossy(capsys, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ("verify", *TOY, "--draft", "toy:2", "--acceptance", "topk:300", *QUICK, "--json", str(file))
    code, out, err = run(capsys, monkeypatch, *arguments, "--limit", "1")
    report = json.loads(file.read_text())
    assert code == 1 and "LOSSY" in out and "VERIFIED" not in out and "topk:300 is lossy" in err.splitlines()[-1]
    assert report["verdict"] == "LOSSY" and report["verified"] is False and report["lossless"] is False


@pytest.mark.slow
def test_verify_says_what_does_not_apply_and_honors_the_category(capsys, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ("verify", *TOY, "--draft", "toy:2", "--acceptance", "block", *QUICK, "--json", str(file))
    code, out, _ = run(capsys, monkeypatch, *arguments, "--category", "code edit")
    checks = json.loads(file.read_text())["checks"]
    assert code == 0 and "VERIFIED" in out and "19 of 26 checks passed, 7 not applicable" in " ".join(out.split())
    assert [check["passed"] for check in checks].count(None) == 7
    assert "1 of 1 identical" in next(check["detail"] for check in checks if check["name"] == "greedy text, one by one")


def test_settings_come_from_a_config_file_or_from_flags(capsys, monkeypatch, tmp_path: Path) -> None:
    file, report = tmp_path / "config.json", tmp_path / "out.json"
    file.write_text('{"drafter": "none"}')
    flags = ("--config", str(file), "--json", str(report))
    assert run(capsys, monkeypatch, "generate", *TOY, *PROMPT, *flags)[0] == 0
    assert json.loads(report.read_text())["results"][0]["stats"]["num_draft_tokens"] == 0
    code, _, err = run(capsys, monkeypatch, "generate", *TOY, *PROMPT, *flags, "--drafter", "none")
    assert code == 2 and "one or the other" in err


def test_ctrl_c_prints_what_was_generated(capsys, monkeypatch, tmp_path: Path) -> None:
    from slipstream.decoder import SpeculativeDecoder

    whole, file = SpeculativeDecoder.run, tmp_path / "out.json"

    def interrupted(self, *args, **kwargs):
        for number, round in enumerate(whole(self, *args, **kwargs)):
            if number == 6:
                raise KeyboardInterrupt
            yield round

    monkeypatch.setattr(SpeculativeDecoder, "run", interrupted)
    flags = ("--drafter", "none", "--json", str(file))
    code, out, _ = run(capsys, monkeypatch, "generate", *TOY, *PROMPT, "-p", "A sparrow", *flags)
    results = json.loads(file.read_text())["results"]
    assert code == 0 and [r["finish_reason"] for r in results] == ["interrupted"] * 2
    assert all(len(r["token_ids"]) == 4 and r["text"] in out for r in results)


def test_ctrl_c_ends_a_command_with_one_line(capsys, monkeypatch) -> None:
    from slipstream.decoder import SpeculativeDecoder

    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(SpeculativeDecoder, "__init__", interrupted)
    for words in (("generate", *TOY, *PROMPT), ("compare", *TOY, *PROMPT), ("verify", *TOY)):
        assert run(capsys, monkeypatch, *words) == (130, "", "error: interrupted\n")


def test_the_installed_command_starts_and_names_its_version() -> None:
    command = [str(Path(sys.executable).with_name("slipstream")), "--version"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0 and process.stdout.strip() == __version__


@pytest.mark.parametrize("command", ["generate", "batch", "bench", "sweep"])
def test_help_shows_the_usual_options_and_help_all_shows_every_one(capsys, monkeypatch, command: str) -> None:
    usual_options, every_option = (
        set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", run(capsys, monkeypatch, command, flag)[1], re.MULTILINE))
        for flag in ("--help", "--help-all")
    )
    usual = {"--target", "--draft", "--drafter", "--num-draft-tokens", "--device", "--max-tokens", "--help-all"}
    assert usual <= usual_options < every_option and len(usual_options) <= 32
    fields_as_flags = {f"--{f.name.replace('_', '-')}" for f in fields(DecoderConfig)}
    assert fields_as_flags <= every_option


@pytest.mark.slow
def test_models_check_says_whether_a_pair_is_usable(capsys, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    code, out, _ = run(capsys, monkeypatch, "models", "check", "toy", "toy:2", "--json", str(file))
    assert code == 0 and "have the same tokens" in out and json.loads(file.read_text())["usable"]
    code, _, err = run(capsys, monkeypatch, "models", "check", "toy", "/nowhere/at/all")
    assert code == 2 and "/nowhere/at/all" in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("more", [("-p", "A sparrow"), ()])
def test_debug_shows_every_round(capsys, monkeypatch, more: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ("generate", *TOY, "--draft", "toy:2", *LENGTH, *PROMPT, *more, "--max-tokens", "20")
    arguments += ("--json", str(file))
    _, _, err = run(capsys, monkeypatch, *arguments, "--debug")
    results = json.loads(file.read_text())["results"]
    assert sum(r["stats"]["num_rounds"] for r in results) == sum(
        " | " in line and "/" in line[:10] for line in err.splitlines()
    )
    assert "-rejected-" in err
    assert "-rejected-" not in run(capsys, monkeypatch, *arguments)[2]


def test_compare_shows_rejected_drafts_with_debug(capsys, monkeypatch) -> None:
    _, _, err = run(capsys, monkeypatch, "compare", *TOY, "--draft", "toy:2", *LENGTH, *PROMPT, "--debug")
    assert "-rejected-" in err


def test_the_demo_shows_every_prompt_side_by_side_and_a_next_step(capsys, monkeypatch, tmp_path: Path) -> None:
    """The toy stands in for the model that the demo downloads."""
    monkeypatch.setattr(demo, "EMBEDDED", "toy")
    file = tmp_path / "demo.json"
    arguments = ("demo", "--max-tokens", "90", "--repeats", "1", "--json", str(file))
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code == 0 and "the output stays the same" in " ".join(err.split())
    assert [line[:4] for line in out.splitlines() if re.match(r"\d/\d ", line)] == [f"{n}/4 " for n in (1, 2, 3, 4)]
    captions = re.findall(r"\d\.\d\dx \((?:as fast|within noise|faster|slower)\): ", out)
    assert len(captions) == 4 and "4 of 4 texts identical to plain decoding" in " ".join(out.split())
    lines, wrapped = out.splitlines(), 0
    for number, line in enumerate(lines):
        if "plain, " in line:
            column, texts = line.index("speculative, "), lines[number + 2 : lines.index("", number)]
            wrapped += len(texts) > 1
            assert [text[:column].strip() for text in texts] == [text[column:].strip() for text in texts]
    assert wrapped
    assert 'slipstream generate "Why is the sky blue?"' in out
    report = json.loads(file.read_text())
    assert report["target"] == "toy" and len(report["prompts"]) == 4


@pytest.mark.slow
def test_the_demo_fails_if_a_text_differs(capsys, monkeypatch) -> None:
    right, wrong = demo.load_decoder, load_wrong_rule("first-mismatch-kept")
    monkeypatch.setattr(demo, "EMBEDDED", "toy")
    monkeypatch.setattr(
        demo, "load_decoder", lambda *arguments: right(*arguments).using("ngram", num_draft_tokens=3, acceptance=wrong)
    )
    code, out, err = run(capsys, monkeypatch, "demo", "--max-tokens", "60", "--repeats", "1", "--debug")
    assert code == 1 and "differ from plain decoding" in err and "-rejected-" in out + err


def test_a_failed_text_among_others_is_reported_with_exit_code_1(capsys, monkeypatch, tmp_path: Path) -> None:
    """The logit bias forbids the only token that the constraint allows."""
    file = tmp_path / "out.json"
    flags = ("--regex", "ab", "--logit-bias", "97=-inf", "--max-tokens", "4", "--json", str(file))
    code, _, err = run(capsys, monkeypatch, "generate", *TOY, *PROMPT, "-p", "A sparrow", *flags)
    results = json.loads(file.read_text())["results"]
    assert code == 1 and len(results) == 2 and "Traceback" not in err
    assert all(result["finish_reason"] == "error" and "no token" in result["error"] for result in results)


def test_statistics_of_a_batch_say_that_a_rule_is_lossy(capsys, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    lossy = ("--draft", "toy:3", "--acceptance", "typical", "--max-tokens", "4", "--json", str(file))
    for more in ((), ("-p", "A sparrow")):
        assert run(capsys, monkeypatch, "generate", *TOY, *PROMPT, *more, *lossy)[0] == 0
        assert not json.loads(file.read_text())["results"][0]["stats"]["lossless"]


@pytest.mark.parametrize("more", [(), ("-p", "A sparrow")])
def test_generate_passes_its_options_to_the_template(
    capsys, monkeypatch, more: tuple[str, ...], tmp_path: Path
) -> None:
    template = "{% if loud %}!{% endif %}{% for m in messages %}{{ m.content }}: {% endfor %}"
    inner = tiny_models.tokenizer(template=template)
    tiny_models.fresh("llama").save_pretrained(tmp_path)
    inner.save_pretrained(tmp_path)
    arguments = ("--target", str(tmp_path), "--max-tokens", "8", "--reproducible", "false", "--dtype", "float32")
    form = ("--chat-template-kwargs", '{"loud": true}', "--answer-start", "so")
    file = tmp_path / "result.json"
    code, _, err = run(capsys, monkeypatch, "generate", "-p", "hello", *more, *arguments, *form, "--json", str(file))
    assert code == 0, err
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "so"}]
    decoder = SpeculativeDecoder(str(tmp_path), reproducible=False, dtype="float32")
    asked = decoder.chat(messages, max_tokens=8, chat_template_kwargs={"loud": True}, continue_final_message=True)
    assert decoder.decode(asked.prompt_token_ids) == "!hello: so"
    results = json.loads(file.read_text())["results"]
    assert results[0]["token_ids"] == asked.token_ids and len(results) == 1 + len(more) // 2
