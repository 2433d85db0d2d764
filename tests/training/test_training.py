"""A trained head predicts its target better than a new one, changes no text, and follows the formulas of training."""

from __future__ import annotations

import errno
import json
from itertools import pairwise
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError
from slipstream.durable_files import locked
from slipstream.models.heads import head_writer
from slipstream.models.heads.network import grouped_attention
from slipstream.models.heads.starting_weights import new_head, starting_weights
from slipstream.training import texts, training_job, training_run
from slipstream.training.held_out import acceptance
from slipstream.training.texts import MadeText, TextMaker, make_texts, read_sources, read_texts, split, user_turn
from slipstream.training.trainable_head import STEPS, Batch, FrozenTarget, TrainableHead, unrolled_attention
from slipstream.training.training_run import STATE, State
from tests.support.head_cases import Written, transcribed
from tests.support.markers import mostly_exhaustive
from tests.support.tiny_models import LETTERS, fresh, prompts, tokenizer
from tests.support.training_cases import decoder, job, small, target, train

SHORT = {"num_steps": 4, "num_tokens": 600}


@pytest.fixture(scope="module")
def shortly_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    train(folder, **SHORT)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    with small(training_job.draw):
        job(folder).run(decoder())
    return folder


def written(folder: Path) -> Written:
    settings = json.loads((folder / "config.json").read_text())
    layers = tuple(settings["eagle_aux_hidden_state_layer_ids"])
    return Written(folder, load_file(folder / "model.safetensors"), layers)


@pytest.mark.slow
def test_training_raises_tokens_per_round_and_lowers_the_loss(trained: Path) -> None:
    progress = [json.loads(line) for line in (trained / "progress.jsonl").read_text().splitlines()]
    assert [line["step"] for line in progress] == [0, 5, 10, 15, 20, 25, 30, 35, 40]
    assert progress[-1]["tokens_per_round"] > progress[0]["tokens_per_round"] + 0.1
    assert progress[-1]["loss"] < progress[1]["loss"]
    assert (trained / "curve.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_a_trained_head_changes_no_text_and_accepts_what_was_estimated(trained: Path) -> None:
    drafting = SpeculativeDecoder(
        target(), str(trained), tokenizer=tokenizer(), drafter="model", num_draft_tokens=STEPS
    )
    plain = drafting.using("none", num_draft_tokens="auto")
    held = [text for text in read_texts(trained) if text.greedy][::5]
    results = [drafting.generate(text.ids[: text.start], max_tokens=len(text.ids) - text.start) for text in held]
    for text, result in zip(held, results, strict=True):
        assert result.token_ids == text.ids[text.start :]
        params = SamplingParams(max_tokens=40, temperature=0.7, seed=3)
        prompt = text.ids[: text.start]
        assert drafting.generate(prompt, params).token_ids == plain.generate(prompt, params).token_ids
    measured = sum(r.stats.num_output_tokens for r in results) / sum(r.stats.num_rounds for r in results)
    estimated = json.loads((trained / "config.json").read_text())["trained"]["held_out_tokens_per_round"]
    assert measured == pytest.approx(estimated, abs=0.1)  # the first token of a text is a round of its own


def test_the_trained_network_drafts_what_its_written_files_draft(shortly_trained: Path) -> None:
    """Unrolled over a text, the head drafts at each row the tokens of a plain transcription of its files."""
    state, head = State.read(shortly_trained), written(shortly_trained)
    assert state is not None
    loaded = decoder().target
    config = new_head(loaded, 256, state.token_ids)
    learner = TrainableHead(config, state.weights, state.feature_size, FrozenTarget(loaded))
    text = prompts([40])[0]
    batch = Batch.padded([(text, 2)], torch.device("cpu"))
    hits = learner.hits(batch)[0]
    for row in (3, 11, 30):
        draft = transcribed(head, target(), text[: row + 2], STEPS)
        expected = [token == drafted for token, drafted in zip(text[row + 2 :], draft, strict=False)]
        agreeing = next((i for i, is_hit in enumerate(expected) if not is_hit), len(expected))
        assert int(hits[row].long().cumprod(-1).sum()) == agreeing


def test_the_written_files_have_the_format_of_speculators(shortly_trained: Path) -> None:
    head, settings = written(shortly_trained), json.loads((shortly_trained / "config.json").read_text())
    assert settings["speculators_model_type"] == "eagle3" and settings["norm_before_residual"] is False
    assert settings["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    ids = head.tensors["d2t"] + torch.arange(len(head.tensors["d2t"]))
    assert torch.equal(head.tensors["t2d"].nonzero()[:, 0], ids)
    trained_on = settings["trained"]
    assert trained_on["target"] == "tiny" and trained_on["steps"] == 4 and trained_on["seed"] == 0


@pytest.mark.slow
def test_a_new_head_starts_with_the_targets_last_layer_on_every_backend() -> None:
    config = new_head(decoder().target, 256, torch.arange(20))
    layer, size = target().model.layers[-1], target().config.hidden_size
    for options in ({}, {"fast": True}):
        weights = starting_weights(decoder(**options).target, config, seed=1)
        for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
            assert torch.allclose(weights[f"layers.0.{name}"], layer.get_submodule(name).weight, atol=1e-6)
        for name in ("self_attn.q_proj", "self_attn.v_proj"):
            copied = weights[f"layers.0.{name}"][:, size:]
            assert torch.allclose(copied, layer.get_submodule(name).weight, atol=1e-6)
        assert torch.allclose(weights["lm_head"], target().lm_head.weight[:20], atol=1e-6)
    other = starting_weights(decoder().target, config, seed=2)
    assert not torch.equal(other["fc"], weights["fc"])


@pytest.mark.parametrize("name", mostly_exhaustive(["qwen3", "gemma3", "phi3", "olmo2"], "gemma3"))
def test_heads_for_other_architectures_have_finite_losses_and_no_empty_weights(name: str) -> None:
    kinds = ["sliding_attention" if name == "gemma3" and i % 2 else "full_attention" for i in range(4)]
    tiny = fresh(name, num_hidden_layers=4, layer_types=kinds)
    model = SpeculativeDecoder(tiny, tokenizer=tokenizer()).target
    config = new_head(model, 90, torch.arange(30))
    weights = starting_weights(model, config, seed=1)
    learner = TrainableHead(config, weights, torch.ones(96), FrozenTarget(model))
    loss, count = learner.loss(Batch.padded([(prompts([30])[0], 5), (prompts([20])[0], 5)], torch.device("cpu")))
    assert count == 40 and bool(loss.isfinite())
    assert all(bool(weight.any()) for weight in weights.values())


def test_attention_of_unrolled_steps_equals_masked_attention() -> None:
    generator, rows = torch.Generator().manual_seed(0), 9
    query = torch.randn(2, 6, rows, 4, generator=generator)
    keys, values = ([torch.randn(2, 3, rows, 4, generator=generator) for _ in range(3)] for _ in range(2))
    causal, itself = torch.ones(rows, rows, dtype=torch.bool).tril(), torch.eye(rows, dtype=torch.bool)

    def masked(later_steps: list[Tensor]) -> Tensor:
        seen = torch.cat([causal, *later_steps], 1).expand(2, -1, -1)
        return grouped_attention(query, torch.cat(keys, 2), torch.cat(values, 2), seen)

    attended = unrolled_attention(query, keys, values, ~causal)
    assert torch.allclose(attended, masked([itself, itself]), atol=1e-6)
    assert not torch.allclose(attended, masked([itself, causal]), atol=1e-3)


def test_acceptance_is_counted_over_the_rounds_of_greedy_decoding() -> None:
    counted = acceptance([[2, 0, 0, 1, 5], [0, 3, 3]], 3)
    # the first text: 2 + 1 tokens, then 1 + 1; the second: 0 + 1, then two of three, as the text ends
    assert counted == [3 / 4, 2 / 4, 0.0]
    assert acceptance([[2, 0, 0, 1, 5]], 1) == [2 / 3]


def test_the_users_turn_is_found_in_the_template() -> None:
    before, ends = user_turn(decoder())
    assert before == [3 + LETTERS.index("u"), 3 + LETTERS.index(":")] and ends == ()
    named = tokenizer(template="{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}")
    with pytest.raises(UsageError, match="does not show where a user's message begins"):
        user_turn(decoder(tokenizer=named))


def test_prompts_and_texts_are_read_from_files(tmp_path: Path) -> None:
    lines, plain = tmp_path / "in.jsonl", tmp_path / "in.txt"
    lines.write_text('{"prompt": "abc"}\n{"text": "abcabcabcabcabc"}\n{"prompt": [5, 6], "chat": false}\n')
    plain.write_text("abc\n\n def \n")
    assert [source.prompt for source in read_sources(plain)] == ["abc", "def"]
    with small():
        made = list(TextMaker(decoder(), read_sources(lines), 0).make(0, 6))
    assert [(number, start) for number, _, start, _ in made] == [(0, 8), (1, 1), (2, 2), (3, 8), (5, 2)]
    assert decoder().decode(made[1][1]) == "abcabcabcabcabc"
    assert [greedy for *_, greedy in made] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ('{"id": 3}', 'line 2: no prompt; allowed: {"prompt": string, ids or messages} or {"text": string}'),
        ('{"prompt": 7}', "line 2: prompt 7; allowed"),
        ('{"prompt": [9999]}', "line 2: prompt: token id 9999"),
    ],
)
def test_an_invalid_line_is_named_before_anything_is_generated(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f'{{"prompt": "abc"}}\n{line}\n')
    with pytest.raises(UsageError) as raised:
        job(tmp_path / "out", prompts=file).run(decoder())
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "out" / STATE).exists()


def test_a_folder_belongs_to_one_training(shortly_trained: Path) -> None:
    with pytest.raises(UsageError, match="was trained with seed=0, not 1; allowed: the same, or another"):
        job(shortly_trained, seed=1, **SHORT)
    other_target = r"was trained for a target with fingerprint 'slip-.*or another folder$"
    with pytest.raises(UsageError, match=other_target):
        job(shortly_trained, **SHORT).run(
            SpeculativeDecoder(fresh("llama", num_hidden_layers=4), tokenizer=tokenizer())
        )
    lock = locked(shortly_trained / training_job.LOCK)
    assert lock is not None
    with pytest.raises(UsageError, match="is in use by another process that trains"):
        job(shortly_trained, **SHORT)  # before a model is loaded
    lock.release()
    before = (shortly_trained / "model.safetensors").read_bytes()
    assert train(shortly_trained, **SHORT)["steps"] == 4  # finished: nothing is left to do
    assert (shortly_trained / "model.safetensors").read_bytes() == before


def test_targets_without_hidden_states_or_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the hidden states of target 'toy' cannot be read"):
        job(tmp_path / "a").run(SpeculativeDecoder("toy"))
    with pytest.raises(UsageError, match="has 2 layers; allowed: 3 or more"):
        job(tmp_path / "b").run(SpeculativeDecoder(fresh("llama"), tokenizer=tokenizer()))
    with pytest.raises(UsageError, match="GPT2LMHeadModel' cannot be read; allowed: models that run on"):
        job(tmp_path / "c").run(SpeculativeDecoder(fresh("gpt2", num_hidden_layers=4), tokenizer=tokenizer()))
    assert list(tmp_path.iterdir()) == []


def test_a_nan_loss_keeps_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = TrainableHead.loss

    def broken(head: TrainableHead, batch: Batch) -> tuple[Tensor, int]:
        total, count = loss(head, batch)
        calls.append(None)
        return (total * float("nan") if len(calls) > 7 else total), count

    calls: list[None] = []
    monkeypatch.setattr(TrainableHead, "loss", broken)
    with pytest.raises(SlipstreamError, match=r"the loss is nan at step \d+; .*training.pt holds step (\d+)$"):
        train(tmp_path, **SHORT)
    monkeypatch.setattr(TrainableHead, "loss", loss)
    state = State.read(tmp_path)
    assert state is not None and 0 < state.step < 4
    assert all(bool(weight.isfinite().all()) for weight in state.weights.values())


@pytest.mark.slow
def test_a_resumed_training_on_prompts_keeps_its_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that answer a held-out prompt are neither learned nor held out."""
    (tmp_path / "mine.txt").write_text("".join(f"{letter}b.\n" for letter in "cdefghi"))
    heads, loss, calls = [], TrainableHead.loss, list[None]()

    def interrupted(head: TrainableHead, batch: Batch) -> tuple[Tensor, int]:
        calls.append(None)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return loss(head, batch)

    for name in ("whole", "interrupted"):
        if name == "interrupted":
            monkeypatch.setattr(TrainableHead, "loss", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train(tmp_path / name, prompts=tmp_path / "mine.txt", **SHORT)
        result = train(tmp_path / name, prompts=tmp_path / "mine.txt", **SHORT)
        learned, held = split(read_texts(tmp_path / name), training_job.HELD_TOKENS)
        assert len(learned) + len(held) < result["texts"]
        heads.append((tmp_path / name / "model.safetensors").read_bytes())
    assert heads[0] == heads[1]


@pytest.mark.slow
@pytest.mark.parametrize("place", mostly_exhaustive(["state", "head"], "state"))
def test_a_full_disk_keeps_the_last_state_and_the_training_can_continue(
    shortly_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    module: Any = {"state": training_run, "head": head_writer}[place]
    replaced, calls = module.replaced, []

    def full(path: Path) -> Any:
        calls.append(path)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return replaced(path)

    monkeypatch.setattr(module, "replaced", full)
    with pytest.raises(SlipstreamError, match=r"no space left on device; .*training.pt holds step \d+$"):
        train(tmp_path, **SHORT)
    monkeypatch.setattr(module, "replaced", replaced)
    train(tmp_path, **SHORT)
    assert (tmp_path / "model.safetensors").read_bytes() == (shortly_trained / "model.safetensors").read_bytes()


class Clock:
    """A clock that advances at every reading, as on a busy machine."""

    def __init__(self, seconds_per_look: float) -> None:
        self.seconds, self._per_look = 0.0, seconds_per_look

    def __call__(self) -> float:
        self.seconds += self._per_look
        return self.seconds


@pytest.mark.slow
def test_too_little_time_for_a_step_is_refused_and_more_time_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "monotonic", Clock(100.0))
    with pytest.raises(UsageError, match=r"--hours 0.1 ended before the first training step; allowed: more"):
        train(tmp_path, hours=0.1, **SHORT)
    assert train(tmp_path, hours=100, **SHORT)["steps"] == 4


@pytest.mark.exhaustive
def test_more_time_continues_a_training_with_more_texts_and_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, append, now = TrainableHead.loss, texts.append, [0.0]

    def slow_loss(*arguments: Any) -> Any:
        now[0] += 10
        return loss(*arguments)

    def slow_append(*arguments: Any) -> None:
        now[0] += 10
        append(*arguments)

    monkeypatch.setattr(TrainableHead, "loss", slow_loss)
    monkeypatch.setattr(texts, "append", slow_append)
    monkeypatch.setattr(training_job, "FEWEST_STEPS", 1)
    monkeypatch.setattr(training_job, "PASSES", 4)
    for module in (texts, training_job, training_run):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    results, made = [], []
    for seconds in (300, 300, 200, 500, 50_000, 60_000):
        results.append(train(tmp_path, hours=seconds / 3600, num_steps=None))
        made.append(read_texts(tmp_path))
    assert [result["finished"] for result in results] == [False, False, False, False, True, True]
    assert [result["new_steps"] > 0 for result in results] == [True, False, False, True, True, False]
    assert made[0] == made[1] == made[2] == made[3][: len(made[0])] and made[3] == made[4][: len(made[3])]
    assert made[4] == made[5] and [result["texts"] for result in results] == [len(part) for part in made]
    tokens = [sum(len(text.ids) for text in part) for part in made]
    assert tokens[0] < tokens[3] < 3000 <= tokens[4]
    learned, held = split(made[4], training_job.HELD_TOKENS)
    assert results[-1]["steps"] == -(-4 * sum(len(text.ids) for text in learned) // 256)
    before = split(made[0], training_job.HELD_TOKENS)[1]
    assert held[: len(before)] == before  # texts that were held out are not learned later


@pytest.mark.slow
@pytest.mark.parametrize("seconds_per_look", mostly_exhaustive([0.1, 0.3, 0.6], 0.6))
def test_the_time_limit_holds_however_slow_the_machine_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_per_look: float
) -> None:
    clock, seconds_left = Clock(seconds_per_look), list[float]()
    for module in (texts, training_job, training_run):
        monkeypatch.setattr(module, "monotonic", clock)
    with small():
        training = job(tmp_path, hours=0.1, num_steps=100_000, num_tokens=1_000_000)
        training.show = lambda progress: seconds_left.append(progress.seconds_left)
        result = training.run(decoder())
    assert 0 < result["steps"] < 100_000 and (tmp_path / "config.json").exists()
    step = 20 * seconds_per_look  # a step and an evaluation read the clock fewer times
    assert clock.seconds < 360 + step
    assert seconds_left[0] <= 360 and seconds_left[-1] < step
    assert all(later <= earlier + step for earlier, later in pairwise(seconds_left))


def test_unfinished_texts_are_kept_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small():
        whole = {number: ids for number, ids, *_ in TextMaker(decoder(), (), seed=0).make(0, 8)}
        monkeypatch.setattr(texts, "monotonic", Clock(0.5))
        made = make_texts(tmp_path, TextMaker(decoder(), (), seed=0), 1_000_000, seconds=300)
    assert 2 <= len(made) == len(read_texts(tmp_path))
    assert all(text.ids == whole[text.number][: len(text.ids)] for text in made)
    assert any(len(text.ids) < len(whole[text.number]) for text in made)


def test_too_little_time_for_two_texts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "monotonic", Clock(1000.0))
    with pytest.raises(UsageError, match=r"--hours 0.1 and --tokens 3000 suffice for 0 texts; allowed: "):
        train(tmp_path, hours=0.1)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / STATE).write_bytes(b"no state")
    with pytest.raises(SlipstreamError, match=r"training.pt' could not be read"):
        train(tmp_path)
    (tmp_path / STATE).unlink()
    (tmp_path / "texts.jsonl").write_text('{"number": 0}\n')
    with pytest.raises(SlipstreamError, match=r"texts.jsonl', line 1 is damaged"):
        train(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"number": 0, "ids": "ab", "start": 1, "greedy": true, "seconds": 0.1}\n')
    with pytest.raises(SlipstreamError, match=r"line 1 is damaged: the text: ids is 'ab'; allowed: list\[int\]"):
        train(tmp_path)


def test_a_finished_training_rewrites_its_head_and_notices_missing_texts(shortly_trained: Path, tmp_path: Path) -> None:
    folder = copytree(shortly_trained, tmp_path / "head")
    head, made = folder / "model.safetensors", folder / "texts.jsonl"
    whole = head.read_bytes()
    head.write_bytes(whole[:100])
    train(folder, **SHORT)
    assert head.read_bytes() == whole
    lines = made.read_bytes().splitlines(keepends=True)
    made.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(SlipstreamError, match=f"holds {len(lines) - 1} texts; allowed: the {len(lines)} with which"):
        train(folder, **SHORT)
    with pytest.raises(SlipstreamError, match=r"texts.jsonl': file exists; nothing was saved yet"):
        train(made, **SHORT)


def test_answers_to_held_out_prompts_are_not_learned() -> None:
    texts = [MadeText(n, [1 + n % 3, 4, n], 2, n % 4 == 0, 0.0) for n in range(12)]
    learned, held = split(texts, 1)
    assert [text.number for text in held] == [0]
    assert [text.number for text in learned] == [n for n in range(12) if n % 3]
    learned, _ = split(texts[::3], 1)
    assert [text.number for text in learned] == [3, 6, 9]  # there is no other prompt


def test_a_draft_vocabulary_has_the_most_frequent_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_job, "SIZES", (2, 4, 8))
    texts = [MadeText(n, [9, 9, 5, 5, 5, 7, 7, 3], 0, False, 0.0) for n in range(2)]
    held = [MadeText(2, [9, 5, 5, 7], 0, True, 0.0)]
    assert training_job.draft_vocabulary(texts, held, 12).tolist() == [3, 5, 7, 9]
    assert training_job.draft_vocabulary(texts, [MadeText(2, [5, 7, 5], 0, True, 0.0)], 12).tolist() == [5, 7]
    unseen = [MadeText(2, [5, 7, 11, 11], 0, True, 0.0)]  # no number of the seen tokens has 11
    assert training_job.draft_vocabulary(texts, unseen, 12).tolist() == [5, 7]
