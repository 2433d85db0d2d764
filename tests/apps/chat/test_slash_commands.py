"""Every slash command of a conversation does what it says."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams
from slipstream.apps.chat.slash_commands import ALIASES, COMMANDS, complete
from tests.support import tiny_models
from tests.support.chat_fakes import face, refused, toy, type_in
from tests.support.markers import subcases
from tests.support.wrong_acceptance_rules import load_wrong_rule


def test_help_lists_every_command_and_explains_one() -> None:
    chat = toy()
    assert all(name in type_in(chat, "/help") for name in COMMANDS)
    assert type_in(chat, "/help gamma").startswith("/draft-length N|auto")


def test_speculative_off_switches_to_plain_decoding_with_the_same_text() -> None:
    chat = toy()
    type_in(chat, "The heron", "/speculative off", "/retry")
    plain = chat.last
    assert len(chat.turns) == 1 and plain.drafter == "none" and plain.stats.num_draft_tokens == 0
    type_in(chat, "/speculative on", "/retry")
    assert chat.last.stats.num_draft_tokens > 0 and chat.last.token_ids == plain.token_ids


def test_drafter_and_draft_length_take_effect_under_every_alias() -> None:
    chat = toy()
    assert "ngram:3" in type_in(chat, "/drafter ngram:3")
    for line, width in (
        ("/draft-length 2", 2),
        ("/gamma 4", 4),
        ("/length-of-draft 5", 5),
        ("/set num_draft_tokens 3", 3),
    ):
        type_in(chat, line, "The heron looked at the water. The heron looked")
        assert max(r.num_draft_tokens for r in chat.last.rounds) == width
    assert type_in(chat, "/draft-length auto") == "draft length: auto"


def test_models_can_be_exchanged_within_a_conversation() -> None:
    chat = toy()
    assert type_in(chat, "The heron", "/draft toy:2") == "draft model: toy:2, drafter: hybrid"
    type_in(chat, "The sparrow")
    assert chat.last.drafter == "hybrid" and "loading toy:2 ..." in face(chat).notes
    assert type_in(chat, "/target toy:3") == "target: toy:3"
    assert chat.decoder.draft is not None and len(chat.turns) == 2
    assert "/retry" in refused(chat, "/compare")  # an answer of another model cannot be compared
    face(chat).errors.clear()
    assert type_in(chat, "/draft none") == "draft model: none, drafter: suffix"


def test_a_failed_load_keeps_the_old_models(tmp_path: Path) -> None:
    chat = toy(draft="toy:2")
    old = chat.decoder
    assert "nowhere" in refused(chat, "/target ./nowhere")
    tiny_models.shared("llama").save_pretrained(tmp_path)
    assert "has 61 logits, target 'toy' has 257, and no tokenizers" in refused(chat, f"/draft {tmp_path}")
    assert chat.decoder is old


def test_running_out_of_memory_while_loading_is_one_line(monkeypatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("not enough memory\nand a stack")

    chat = toy()
    monkeypatch.setattr("slipstream.wiring.model_pair.load", fail)
    assert refused(chat, "/draft toy:2") == "toy:2 could not be loaded: not enough memory"


def test_a_seed_repeats_a_sampled_answer_and_none_draws_a_new_seed() -> None:
    chat = toy(max_tokens=40)
    type_in(chat, "/sampling multinomial", "/seed 5", "The heron")
    first = chat.last.token_ids
    type_in(chat, "/retry")
    assert chat.last.token_ids == first
    type_in(chat, "/seed none", "/retry")
    assert chat.last.params.seed not in (5, None)
    type_in(chat, f"/seed {chat.last.params.seed}")
    drawn = chat.last.token_ids
    type_in(chat, "/retry")
    assert chat.last.token_ids == drawn


def test_cache_shows_clears_and_turns_off_the_kv_cache() -> None:
    chat = toy(draft="toy:2")
    assert type_in(chat, "/cache") == "cache: on; 0 tokens cached, the draft model's 0"
    type_in(chat, "The heron")
    length = len(chat.last.prompt_ids) + len(chat.last.token_ids)
    assert f"{length - 1} tokens cached" in type_in(chat, "/cache")
    type_in(chat, "The sparrow")
    assert chat.last.prefilled < length
    assert "; 0 tokens cached" in type_in(chat, "/cache clear") and chat.cache
    assert type_in(chat, "/cache off").startswith("cache: off")
    type_in(chat, "A fish", "A stone")
    assert all(turn.prefilled == len(turn.prompt_ids) - 1 for turn in chat.turns[2:])


def test_debug_shows_the_rounds() -> None:
    chat = toy()
    type_in(chat, "/debug on", "The heron looked at the water. The heron looked")
    view = face(chat).said[-1]
    assert len(view.splitlines()) == 1 + len(chat.last.rounds) and "accepted" in view
    type_in(chat, "/debug off", "/retry")
    assert face(chat).said[-1] == "debug: off"


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3, "min_tokens": 9}])
def test_compare_finds_the_same_text_even_when_interrupted(options: dict[str, Any]) -> None:
    chat = toy(max_tokens=40, **options)
    for stop in (None, 3):
        face(chat).stop_after = stop
        type_in(chat, "The heron")
        line = type_in(chat, "/compare")
        assert line.endswith("text identical") and line.count("tok/s") == 2


def test_compare_uses_the_rule_that_produced_the_answer() -> None:
    chat = toy(draft="toy:2")
    type_in(
        chat, "/drafter model", "/set temperature 1", "/seed 3", "/acceptance block", "The heron", "/acceptance auto"
    )
    assert type_in(chat, "/compare").endswith("as sampled text may")
    type_in(chat, "/retry")
    assert "text identical" in type_in(chat, "/compare")


def test_compare_catches_a_wrong_text() -> None:
    chat = toy(max_tokens=60, draft="toy:2")
    chat.decoder = chat.decoder.using(acceptance=load_wrong_rule("first-mismatch-kept"))
    assert "text DIFFERS at" in type_in(chat, "The heron", "/compare")


def test_acceptance_says_when_it_is_lossy() -> None:
    chat = toy(draft="toy:2")
    assert "lossy" in type_in(chat, "/acceptance typical") and not chat.decoder.lossless
    assert type_in(chat, "/acceptance block") == "acceptance: block"


def test_stats_save_and_reset_cover_all_turns(tmp_path: Path) -> None:
    chat, file = toy(), tmp_path / "talk.json"
    face(chat).stop_after = 3
    type_in(chat, "/system Once", "The heron", "The sparrow")
    summary = type_in(chat, "/stats")
    tokens = sum(len(turn.token_ids) for turn in chat.turns)
    assert summary.startswith("2 turns, 1 interrupted") and f"{tokens} tokens, " in summary
    type_in(chat, f"/save {file}")
    saved = json.loads(file.read_text())
    assert saved["messages"] == chat.messages and saved["target"] == "toy"
    assert [turn["finish_reason"] for turn in saved["turns"]] == ["interrupted", "length"]
    assert saved["turns"][1]["token_ids"] == chat.last.token_ids
    type_in(chat, "/reset")
    assert chat.turns == [] and chat.system == "Once" and type_in(chat, "/stats") == "0 turns, 0 interrupted"


def test_quit_closes() -> None:
    for line in ("/quit", "/exit"):
        chat = toy()
        type_in(chat, line)
        assert chat.closed


# What may be typed after a slash command: options, methods, mistakes and completion


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/sampling greedy", (0.0, 0, 1.0, 0.0)),
        ("/sampling multinomial", (1.0, 0, 1.0, 0.0)),
        ("/sampling multinomial 0.7 0.1", (0.7, 0, 1.0, 0.1)),
        ("/sampling topk 0.8 20", (0.8, 20, 1.0, 0.0)),
        ("/sampling nucleus 0.7 0.9", (0.7, 0, 0.9, 0.0)),
        ("/sampling nucleus top_p=0.5 min_p=0.05", (1.0, 0, 0.5, 0.05)),
        ("/sampling topknucleus 0.7 30 0.8", (0.7, 30, 0.8, 0.0)),
    ],
)
def test_sampling_methods_replace_all_sampling_options(line: str, expected: tuple[float, ...]) -> None:
    chat = toy(temperature=0.3, top_k=9, top_p=0.2, min_p=0.3)
    type_in(chat, line)
    p = chat.params
    assert (p.temperature, p.top_k, p.top_p, p.min_p) == expected


@subcases(
    "line, name, value",
    [
        ("/set repetition_penalty 1.2", "repetition_penalty", 1.2),
        ("/set stop ###", "stop", ("###",)),
        ("/set stop 7", "stop", ("7",)),
        (r'/set stop ["\n", "two words"]', "stop", ["\n", "two words"]),
        ('/set logit_bias {"5": -2}', "logit_bias", {5: -2}),
        ('/set bad_words ["stone"]', "bad_words", ["stone"]),
        ("/set ignore_eos on", "ignore_eos", True),
        ("/set min_tokens 3", "min_tokens", 3),
        ("/length 77", "max_tokens", 77),
        ("/seed 4", "seed", 4),
    ],
)
def test_any_sampling_option_can_be_set_and_unset(line: str, name: str, value: object) -> None:
    chat = toy(max_tokens=24)
    type_in(chat, line)
    assert getattr(chat.params, name) == value
    type_in(chat, f"/set {name} none")
    assert getattr(chat.params, name) == getattr(SamplingParams(), name)
    assert f"{name}: " in type_in(chat, "/set")


@subcases(
    "line, part",
    [
        ("/draft-lenght 3", "did you mean /draft-length"),
        ("/xyzzyx", "/help lists them"),
        ("/", "unknown command '/'"),
        ("/draft-length many", "num_draft_tokens='many'; allowed: 'auto', 'chain', a whole number from 0 to 64"),
        ("/draft-length 65", "allowed"),
        ("/draft-length -1", "allowed"),
        ("/drafter oracle", "allowed: auto, "),
        ("/drafter model", "needs a draft model"),
        ("/acceptance luck", "allowed"),
        ("/speculative maybe", "allowed: on, off"),
        ("/debug 1", "allowed: on, off"),
        ("/cache empty", "allowed: on, off, clear"),
        ("/length 0", "max_tokens=0; allowed"),
        ("/length long", "max_tokens='long'; allowed"),
        ("/seed -1", "seed=-1; allowed"),
        ("/set", None),
        ("/set temp 1", "allowed: temperature, top_k"),
        ("/set logits_processors x", "allowed: temperature"),
        ("/set temperature NaN", "temperature=nan; allowed"),
        ('/set logit_bias {"x": 1}', "logit_bias"),
        ("/set top_k 2.5", "top_k=2.5; allowed"),
        ("/sampling beam", "allowed: greedy, multinomial, topk, nucleus, topknucleus"),
        ("/sampling greedy 1", "allowed: greedy alone"),
        ("/sampling nucleus hot", "temperature 'hot'; allowed: /sampling nucleus [temperature] [top_p] [min_p]"),
        ("/sampling nucleus 0", "temperature 0 is greedy"),
        ("/sampling nucleus 1 2", "top_p=2.0; allowed"),
        ("/sampling nucleus 1 1 1 1", "allowed: /sampling nucleus"),
        ("/sampling topk top_p=0.3", "allowed: /sampling topk"),
        ("/sampling topk 1 2.5", "top_k '2.5'"),
        ("/compare", "no turn yet"),
        ("/retry", "no turn yet"),
        ("/reset now", "allowed: /reset alone"),
        ("/quit now", "allowed: /quit alone"),
        ("/save", "allowed: /save FILE"),
        ("/save /no/such/folder/file", "cannot be written"),
        ("/help nothing", "unknown command '/nothing'"),
        ("/target", None),
        ("/target toy:99", "ORDER from 1 to 16"),
        ("/draft", None),
    ],
)
def test_wrong_input_is_one_line_and_changes_nothing(line: str, part: str | None) -> None:
    chat = toy()
    before = (chat.decoder, chat.params, chat.speculative, chat.cache, chat.debug)
    if part is None:
        type_in(chat, line)  # without an argument it only shows the value
    else:
        assert part in refused(chat, line)
    assert (chat.decoder, chat.params, chat.speculative, chat.cache, chat.debug) == before and chat.turns == []


def test_a_leading_space_escapes_a_slash_and_an_empty_line_does_nothing() -> None:
    chat = toy()
    type_in(chat, " /usr is a folder", "", "   ")
    assert [turn.user for turn in chat.turns] == ["/usr is a folder"]


def test_completion_knows_commands_and_their_arguments() -> None:
    assert complete("/") == sorted([*COMMANDS, *ALIASES])
    assert complete("/st") == ["/stats"] and complete("/sampling n") == ["nucleus"]
    assert complete("/set te") == ["temperature"] and complete("/cache c") == ["clear"]
    assert "none" in complete("/draft ") and complete("/target t") == ["toy"] and "/draft-length" in complete("/help ")
    assert {"auto", "ngram"} <= set(complete("/drafter "))
    assert complete("/length-of-draft a") == ["auto"]
    assert complete("hello") == complete("/nothing x") == complete("/set stop x") == []


def test_temperature_and_top_p_have_commands_of_their_own() -> None:
    chat = toy(max_tokens=12)
    assert type_in(chat, "/temperature 0.8") == "temperature: 0.8" and type_in(chat, "/top-p 0.9") == "top_p: 0.9"
    type_in(chat, "The heron")
    assert (chat.last.params.temperature, chat.last.params.top_p) == (0.8, 0.9)
    assert f"seed {chat.last.params.seed}" in face(chat).notes[-1]
    assert f"seeds of sampled answers: {chat.last.params.seed}" in type_in(chat, "/stats")
    type_in(chat, "/temperature none", "/retry")  # the model's own, of which the toy has none
    assert chat.last.params.temperature == 0 and "seed" not in face(chat).notes[-1] + type_in(chat, "/stats")


def test_a_saved_conversation_goes_on_after_it_is_loaded(tmp_path: Path) -> None:
    chat, file = toy(), tmp_path / "saved.json"
    type_in(chat, "/system Be brief.", "The heron", f"/save {file}", "The sparrow")
    other = toy()
    assert type_in(other, f"/load {file}") == chat.turns[0].answer and other.system == "Be brief."
    type_in(other, "The sparrow")
    assert other.messages == chat.messages and other.last.token_ids == chat.last.token_ids
    type_in(other, f"/save {file}", "/reset")
    assert other.messages == [{"role": "system", "content": "Be brief."}]
    assert len(json.loads(file.read_text())["messages"]) == 5


@pytest.mark.parametrize("content", ["", "{}", '{"messages": [{"role": "tool", "content": ""}]}', '{"messages": [3]}'])
def test_a_file_without_a_conversation_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    chat = toy()
    assert "x.json" in refused(chat, f"/load {tmp_path / 'x.json'}") and not chat.earlier


def test_the_conversation_is_kept_for_its_owner_alone_after_every_answer(tmp_path: Path) -> None:
    chat = toy()
    chat.kept_in = tmp_path / "last.json"
    type_in(chat, "The heron", "The sparrow")
    assert json.loads(chat.kept_in.read_text())["messages"] == chat.messages
    assert chat.kept_in.stat().st_mode & 0o777 == 0o600


def test_a_file_goes_with_the_next_message_alone(tmp_path: Path) -> None:
    chat, file = toy(), tmp_path / "notes.txt"
    file.write_text("The heron stands.\n")
    assert type_in(chat, f"/file {file}") == "with the next message: notes.txt (18 characters)"
    type_in(chat, "Who stands?")
    assert chat.last.user == "notes.txt:\n\nThe heron stands.\n\nWho stands?"
    type_in(chat, "/retry")
    assert len(chat.turns) == 1 and chat.last.user.count("notes.txt") == 1
    type_in(chat, f"/file {file}", "/file none", "And now?")
    assert chat.last.user == "And now?"
    file.write_bytes(b"\xff\xfe")
    assert "not valid UTF-8" in refused(chat, f"/file {file}")
    for name in ("cat.PNG", "cat.jpeg", "cat.webp"):
        assert f"/file {name!r} is a picture; allowed: a text file" in refused(chat, f"/file {name}")
