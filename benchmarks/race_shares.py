"""What says best whether the target will choose a draft model's token: its probability, or its share of the race?

    python benchmarks/race_shares.py qwen1.5b qwen0.5b PROMPTS.jsonl --limit 4 --temperature 0.8

The target writes texts of its own; at each of their places both models' distributions are raced with the same random
numbers, several times with others. Prints how often the winners agree and the mean log-loss of predicting that, each of
20 bins predicting what is most often so in it (chosen on the same draws), and of the share how far each bin itself is
from that. In full precision of the distributions; nothing is drafted and nothing is timed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from terminal import Count, console, run
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.rng import Race, words
from slipstream.errors import UsageError
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import read_prompts
from slipstream.text.vocabulary import same_vocabulary

BINS = 20


def main(
    target: str,
    draft: str,
    prompts: Path,
    limit: Annotated[int, typer.Option(min=1, help="prompts of each category")] = 4,
    tokens: Count = 48,
    races: Count = 12,
    temperature: Annotated[float, typer.Option(min=0.01)] = 0.8,
) -> None:
    """Print the two log-losses and the shares' table."""
    quiet()
    with SpeculativeDecoder(target, draft, acceptance="match") as decoder:
        assert decoder.draft is not None
        if not same_vocabulary(decoder.target, decoder.draft):
            raise UsageError(f"draft {draft!r} has another vocabulary than target {target!r}; allowed: the same")
        pairs = [_distributions(decoder, one.prompt, tokens, temperature) for one in read_prompts(prompts, limit=limit)]
    p, q = (torch.cat(one) for one in zip(*pairs, strict=True))
    race, own, shares, agreed = Race(p.shape[1], p.device), list[Tensor](), list[Tensor](), list[Tensor]()
    for turn in range(races):
        bits = race.bits(words([turn * len(p) + i for i in range(len(p))]))
        for at in range(0, len(p), 64):
            some = slice(at, at + 64)
            speeds = race.speeds(q[some], bits[some])
            winner = speeds.argmax(-1, keepdim=True)
            own.append(q[some].gather(1, winner)[:, 0])
            shares.append((speeds.gather(1, winner) / speeds.sum(-1, keepdim=True))[:, 0])
            agreed.append(winner[:, 0] == race.draw(p[some], bits[some]))
    told, happened = {"probability": torch.cat(own), "share": torch.cat(shares)}, torch.cat(agreed)
    console.print(
        f"{len(happened)} draws at {temperature:g}: the winners agree in {float(happened.float().mean()):.1%}"
    )
    for name, certainty in told.items():
        console.print(f"{name}: log-loss {_log_loss(certainty, happened):.3f}")
    for number in range(BINS):
        inside = _bins(told["share"]) == number
        if bool(inside.any()):
            rate = float(happened[inside].float().mean())
            console.print(f"share {number / BINS:.2f} to {(number + 1) / BINS:.2f}: {rate:.2f} of {int(inside.sum())}")


def _distributions(decoder: SpeculativeDecoder, prompt: str, tokens: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Both models' distributions at each place of a text that the target samples, [N, V] each."""
    result = decoder.generate(prompt, SamplingParams(temperature=temperature, max_tokens=tokens, seed=0))
    text = torch.tensor([[*result.prompt_token_ids, *result.token_ids]])
    assert decoder.draft is not None
    made = []
    for loaded in (decoder.target, decoder.draft):
        loaded.backend.reserve(1, text.shape[1])
        with torch.inference_mode():
            logits = loaded.backend.forward(text, [0], first_slot=0, logits=True)[0]
        of_text = logits[len(result.prompt_token_ids) - 1 : -1, : decoder.target.backend.vocab_size].float()
        made.append((of_text / temperature).softmax(-1))
    decoder.forget()
    return made[0], made[1]


def _bins(certainty: Tensor) -> Tensor:
    return (certainty * BINS).long().clamp(max=BINS - 1)


def _log_loss(certainty: Tensor, happened: Tensor) -> float:
    bins, said = _bins(certainty), happened.float()
    rate = torch.zeros(BINS).scatter_reduce_(0, bins, said, "mean", include_self=False)[bins].clamp(1e-3, 1 - 1e-3)
    return float(-torch.where(happened, rate, 1 - rate).log().mean())


if __name__ == "__main__":
    run(main)
