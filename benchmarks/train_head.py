"""Trains an EAGLE-3 head for a Llama from conversations that it has with itself. Needs no data set.

    python benchmarks/train_head.py texts FOLDER --seconds 80 --device cuda     # the target asks itself, and answers
    python benchmarks/train_head.py train FOLDER HEAD --seconds 320 --device cuda
    python benchmarks/train_head.py train FOLDER HEAD --seconds 60 --device cpu --batch 8   # does it learn at all?

Texts: all rows march in lockstep through one KV cache. After the beginning of the chat template the target invents a
question, mostly from a given opening, at temperature 1; then it answers, greedily or at 0.5, 0.8 or 1 (Magpie, Xu et
al. 2024, arXiv:2406.08464). Training: test-time training of EAGLE-3 (Li et al. 2025, arXiv:2503.01840, section 3.2): in
step k each row has the token k places on and its own output of step k - 1 for a feature. Loss: cross-entropy with the
target's distribution over the draft vocabulary, step k weighted 0.9^k. Matrices by Muon, the rest by AdamW.

The head starts from the target's last layer. It is written in the layout of `speculators`, its matrices in 8 bits.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from terminal import in_one_line
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear, rms_norm, scaled_dot_product_attention, silu
from transformers import AutoConfig

from slipstream.models.cache_folder import cache_folder

OPENINGS = (
    "Write a short story about",
    "Compose a poem about",
    "Compose an engaging travel blog post about",
    "Draft a professional email",
    "Describe a character who",
    "Write a persuasive essay",
    "Pretend to be a",
    "Imagine yourself as",
    "You are an expert in",
    "Act as a",
    "Assume the role of",
    "As a historian, tell",
    "What is",
    "What are the",
    "How does",
    "How do",
    "Why is",
    "Explain",
    "Explain in simple terms",
    "In the field of biology",
    "Describe the process of",
    "What happens when",
    "Discuss the",
    "Compare and contrast",
    "Analyze",
    "Provide insights into",
    "Summarize the following article:",
    "Translate the following sentence into",
    "Fix the grammar of",
    "Give me a list of",
    "Suggest",
    "Recommend",
    "Plan a",
    "Can you help me",
    "I want to",
    "Which is better",
    "When did",
    "Where is",
    "Write a Python function that",
    "Write an SQL query",
    "Solve",
    "Calculate",
    "A train",
    "John has",
    "Extract",
    "Classify",
    "Given the following text",
    "Tell me about",
    "Discuss the importance of",
    "Define",
    "Outline",
    "Design",
    "Write a speech",
    "Brainstorm",
    "Hello",
    "What do you think about",
    "Who invented",
    "What is the difference between",
    "How many",
    "Critique",
    "Reflect on",
)
HEAT = (0.0, 0.0, 0.5, 0.8, 1.0)  # temperatures of answers; 0 is greedy
QUESTION = 96  # tokens of a question at most
COVERED = 0.97  # share of the answers' tokens that the draft vocabulary has
SIZES = (2048, 4096, 8192, 12288, 16384)  # of draft vocabularies
LAST = 0.7  # of the time the learning rate falls to 0

Rope = tuple[Tensor, Tensor]


def rotations(count: int, size: int, theta: float, device: torch.device) -> Rope:
    """Cosines and sines [count, size] of positions 0, 1, ..."""
    inverse = theta ** -(torch.arange(0, size, 2, device=device) / size)
    angles = torch.arange(count, device=device)[:, None] * inverse
    both = torch.cat([angles, angles], -1)
    return both.cos(), both.sin()


def rotated(x: Tensor, rope: Rope) -> Tensor:
    """x: [B, heads, W, D] turned by cosines and sines [W, D]."""
    first, second = x.chunk(2, -1)
    return x * rope[0].to(x.dtype) + torch.cat([-second, first], -1) * rope[1].to(x.dtype)


class Target:
    """A Llama by its tensors. forward: [B, W] token ids to normed states [B, W, H], beside what entered some layers."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.config = AutoConfig.from_pretrained(folder)
        self.state = load_file(folder / "model.safetensors")
        self.device, self.layers = device, list[dict[str, Tensor]]()
        self.embed, self.final = self._tensor("model.embed_tokens"), self._tensor("model.norm")
        for i in range(self.config.num_hidden_layers):
            layer = f"model.layers.{i}."
            attention = [self._tensor(f"{layer}self_attn.{name}_proj") for name in "qkv"]
            gates = [self._tensor(f"{layer}mlp.{name}_proj") for name in ("gate", "up")]
            self.layers.append(
                {
                    "before": self._tensor(f"{layer}input_layernorm"),
                    "qkv": torch.cat(attention),
                    "out": self._tensor(f"{layer}self_attn.o_proj"),
                    "middle": self._tensor(f"{layer}post_attention_layernorm"),
                    "gate_up": torch.cat(gates),
                    "down": self._tensor(f"{layer}mlp.down_proj"),
                }
            )

    def rope(self, count: int) -> Rope:
        """The rotations of its positions."""
        theta = self.config.rope_parameters["rope_theta"]
        return rotations(count, self.config.head_dim, theta, self.device)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm with the target's epsilon."""
        return rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.config.rms_norm_eps)

    def forward(
        self, ids: Tensor, rope: Rope, kept: tuple[int, ...] = (), cache: list[Tensor] | None = None, at: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """cache: of each layer, [2, B, key heads, positions, D]; `ids` stand from position `at` on in it."""
        width, entering = ids.shape[1], []
        turned = rope[0][at : at + width], rope[1][at : at + width]
        x = embedding(ids, self.embed)
        for i, layer in enumerate(self.layers):
            if i in kept:
                entering.append(x)
            x = x + linear(self._attended(i, layer, self.norm(x, layer["before"]), turned, cache, at), layer["out"])
            gate, up = linear(self.norm(x, layer["middle"]), layer["gate_up"]).chunk(2, -1)
            x = x + linear(silu(gate) * up, layer["down"])
        return self.norm(x, self.final), entering

    def _attended(
        self, i: int, layer: dict[str, Tensor], x: Tensor, rope: Rope, cache: list[Tensor] | None, at: int
    ) -> Tensor:
        config, (batch, width, _) = self.config, x.shape
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        parts = linear(x, layer["qkv"]).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        q, k = rotated(parts[:, :heads], rope), rotated(parts[:, heads : heads + key_heads], rope)
        v = parts[:, heads + key_heads :]
        if cache is None:
            k, v = (part.repeat_interleave(heads // key_heads, 1) for part in (k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        cache[i][0][:, :, at : at + width], cache[i][1][:, :, at : at + width] = k, v
        keys, values = cache[i][0][:, :, : at + 1], cache[i][1][:, :, : at + 1]
        # the heads that share keys as positions of one: keys are read once
        shared = q.reshape(batch, key_heads, heads // key_heads, config.head_dim)
        return scaled_dot_product_attention(shared, keys, values).reshape(batch, 1, -1)

    def _tensor(self, name: str) -> Tensor:
        return self.state[f"{name}.weight"].to(self.device, torch.bfloat16)


@torch.inference_mode()
def converse(target: Target, folder: Path, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids [rows, length] int32 and marks [rows, length] uint8: 1 the target's answers, 2 its greedy ones."""
    words, device = Tokenizer.from_file(str(folder / "tokenizer.json")), target.device
    dice, noise = random.Random(seed), torch.Generator(device).manual_seed(seed)

    def ids_of(text: str) -> list[int]:
        ids: list[int] = words.encode(text, add_special_tokens=False).ids
        return ids

    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    (end,) = ids_of("<|im_end|>")
    beginning = ids_of(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")
    openings = [beginning + (ids_of(dice.choice(OPENINGS)) if dice.random() < 0.7 else []) for _ in range(rows)]
    size = max(map(len, openings)) + 8
    queue, left = _padded(openings, size, device), torch.tensor([len(text) for text in openings], device=device)
    turns = [_padded([ids_of(f"\n<|im_start|>{role}\n")], size, device) for role in ("assistant", "user")]
    num_forced = [len(ids_of(f"\n<|im_start|>{role}\n")) for role in ("assistant", "user")]
    heat = torch.tensor([dice.choice(HEAT) for _ in range(rows)], device=device)
    place, said = torch.zeros_like(left), torch.zeros_like(left)
    answering = torch.zeros(rows, dtype=torch.bool, device=device)
    shape = 2, rows, target.config.num_key_value_heads, length, target.config.head_dim
    cache = [torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in target.layers]
    texts = torch.zeros(rows, length, dtype=torch.int64, device=device)
    marks, rope, token = torch.zeros(rows, length, dtype=torch.uint8, device=device), target.rope(length), queue[:, 0]
    states = torch.empty(0, device=device)
    for at in range(length):
        forced = left > 0
        if at:
            logits = linear(states[:, 0], target.embed).float()
            now = torch.where(answering, heat, 1.0)
            race = torch.empty_like(logits).exponential_(generator=noise).clamp_(min=1e-20).log_()
            chosen = (logits / now.clamp(min=1e-3)[:, None] - (now > 0)[:, None] * race).argmax(-1)
            chosen = torch.where((chosen == 0) | (~answering & (said > QUESTION)), end, chosen)
            token = torch.where(forced, queue.gather(1, place.clamp(max=size - 1)[:, None])[:, 0], chosen)
            marks[:, at] = (~forced & answering) * (1 + (now == 0)).to(torch.uint8)
        texts[:, at] = token
        place, left = place + forced, left - forced.long()
        said = torch.where(forced, 0, said + 1)
        ended = ~forced & (token == end)
        for is_next, turn, count in zip((ended & ~answering, ended & answering), turns, num_forced, strict=True):
            queue, left = torch.where(is_next[:, None], turn, queue), torch.where(is_next, count, left)
        place, answering = torch.where(ended, 0, place), answering ^ ended
        states, _ = target.forward(token[:, None], rope, cache=cache, at=at)
    return texts.to(torch.int32).cpu(), marks.cpu()


def _padded(texts: list[list[int]], size: int, device: torch.device) -> Tensor:
    return torch.tensor([text + [0] * (size - len(text)) for text in texts], device=device)


class Head(nn.Module):
    """The network of `slipstream.models.heads.network`, with parameters in float32."""

    def __init__(self, target: Target, layers: tuple[int, ...], token_ids: Tensor) -> None:
        super().__init__()
        self.target, self.layers, self.token_ids, size = target, layers, token_ids, target.config.hidden_size
        last = f"model.layers.{target.config.num_hidden_layers - 1}."
        weights = {"fc": torch.randn(size, len(layers) * size) * 0.5 / (len(layers) * size) ** 0.5}
        for name in "qkv":
            own = target.state[f"{last}self_attn.{name}_proj.weight"].float()
            weights[f"layers.0.self_attn.{name}_proj"] = torch.cat([torch.randn_like(own) * 0.02, own], 1)
        for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            weights[f"layers.0.{name}"] = target.state[f"{last}{name}.weight"].float()
        weights["lm_head"] = target.state["model.embed_tokens.weight"][token_ids.cpu()].float()
        norms = [f"layers.0.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
        weights |= {name: torch.ones(size) for name in [*norms, *(f"fc_norm.{i}" for i in range(len(layers)))]}
        weights["norm"] = target.state["model.norm.weight"].float()
        self.weights = nn.ParameterDict({name.replace(".", "/"): weight for name, weight in weights.items()})

    def of(self, name: str) -> Tensor:
        """A weight in the target's type."""
        return self.weights[name.replace(".", "/")].to(torch.bfloat16)

    def enter(self, features: list[Tensor]) -> Tensor:
        """[B, S, H] of what entered the layers, [B, S, H] each."""
        normed = [self.target.norm(part, self.of(f"fc_norm.{i}")) for i, part in enumerate(features)]
        return linear(torch.cat(normed, -1), self.of("fc"))

    def step(
        self, tokens: Tensor, entered: Tensor, rope: Rope, past: Rope | None, mask: Tensor | None
    ) -> tuple[Tensor, Rope]:
        """Outputs [B, S, H], and the keys and values of all steps so far."""
        config, target = self.target.config, self.target
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        embedded = target.norm(embedding(tokens, target.embed), self.of("layers.0.input_layernorm"))
        both = torch.cat([embedded, target.norm(entered, self.of("layers.0.hidden_norm"))], -1)
        q, k, v = (
            linear(both, self.of(f"layers.0.self_attn.{name}_proj"))
            .unflatten(-1, (-1, config.head_dim))
            .transpose(1, 2)
            for name in "qkv"
        )
        k, v = (part.repeat_interleave(heads // key_heads, 1) for part in (rotated(k, rope), v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        attended = scaled_dot_product_attention(rotated(q, rope), k, v, attn_mask=mask, is_causal=mask is None)
        hidden = entered + linear(attended.transpose(1, 2).flatten(2), self.of("layers.0.self_attn.o_proj"))
        middle = target.norm(hidden, self.of("layers.0.post_attention_layernorm"))
        gate, up = (linear(middle, self.of(f"layers.0.mlp.{name}_proj")) for name in ("gate", "up"))
        return hidden + linear(silu(gate) * up, self.of("layers.0.mlp.down_proj")), (k, v)


def masks(length: int, steps: int, device: torch.device) -> list[Tensor | None]:
    """Of each step: earlier rows' keys of the first step, and of the later steps those of the row itself."""
    eye = torch.eye(length, dtype=torch.bool, device=device)
    causal = torch.ones_like(eye).tril()
    return [None, *(torch.cat([causal, *[eye] * k], 1)[None, None] for k in range(1, steps))]


def unroll(
    head: Head, ids: Tensor, answers: Tensor, seen: list[Tensor | None], rope: Rope
) -> tuple[Tensor, list[float]]:
    """The loss on rows whose next token is an answer's, and the share whose first 1, 2, ... drafts are all right."""
    target, steps = head.target, len(seen)
    length = (ids.shape[1] - steps) // 8 * 8
    with torch.no_grad():
        states, features = target.forward(ids, rope, head.layers)
        logits = linear(states[:, 1 : length + steps], target.embed)
        best, laws = logits.argmax(-1), logits[..., head.token_ids].float().softmax(-1).to(torch.bfloat16)
        del logits
    entered, past = head.enter([part[:, :length] for part in features]), None
    loss, right, shares = torch.zeros((), device=ids.device), torch.ones_like(answers[:, :length]).bool(), []
    for k, mask in enumerate(seen):
        place = slice(1 + k, 1 + k + length)
        entered, past = head.step(ids[:, place], entered, (rope[0][place], rope[1][place]), past, mask)
        counted = answers[:, 2 + k : 2 + k + length].bool()
        drafted = linear(target.norm(entered[counted], head.of("norm")), head.of("lm_head"))
        loss = loss + 0.9**k * cross_entropy(drafted, laws[:, k : k + length][counted])
        hit = torch.zeros_like(right)
        hit[counted] = head.token_ids[drafted.argmax(-1)] == best[:, k : k + length][counted]
        right = right & hit
        shares.append(float(right.sum()) / max(1, int(counted.sum())))
    return loss, shares


def write(head: Head, folder: Path, trained: dict[str, Any]) -> None:
    """The head in the layout of `speculators`; matrices as 8-bit integers with a scale per output."""
    folder.mkdir(parents=True, exist_ok=True)
    ids, config = head.token_ids.cpu(), head.target.config
    tensors: dict[str, Tensor] = {"d2t": (ids - torch.arange(len(ids))).to(torch.int32)}
    for name, weight in head.weights.items():
        key, values = f"{name.replace('/', '.')}.weight", weight.detach().float().cpu()
        if values.dim() == 2:
            scale = (values.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
            tensors[f"{key}_scale"] = scale
            values = (values / scale.float()).round().clamp(-127, 127).to(torch.int8)
        tensors[key] = values if values.dtype == torch.int8 else values.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    layer = {name: getattr(config, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    layer |= {name: getattr(config, name) for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size")}
    layer |= {"model_type": "llama", "num_hidden_layers": 1, "rope_theta": config.rope_parameters["rope_theta"]}
    settings = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(ids),
        "fc_norm": True,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(head.layers),
        "transformer_layer_config": layer,
        "trained": trained,
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


app = typer.Typer(add_completion=False)
Device = Annotated[str, typer.Option(help="cuda or cpu")]
Model = Annotated[Path | None, typer.Option(help="folder of the target; default: SmolLM2's")]


@app.command("texts")
def texts_command(
    folder: Path,
    seconds: float = 80,
    rows: int = 2048,
    length: int = 768,
    seed: int = 1,
    device: Device = "cuda",
    model: Model = None,
) -> None:
    """Let the target talk with itself for about so many seconds."""
    where = model or cache_folder() / "smollm2"
    target, started = Target(where, torch.device(device)), perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    while perf_counter() - started < seconds:
        ids, marks = converse(target, where, rows, length, seed)
        save_file({"ids": ids, "marks": marks}, folder / f"{seed:05d}.safetensors")
        print(f"{seed}: {ids.numel()} tokens, {float((marks > 0).float().mean()):.0%} of them answers", flush=True)
        seed += 1


@app.command("train")
def train_command(
    folder: Path,
    out: Path,
    seconds: float = 320,
    batch: int = 32,
    steps: int = 5,
    rate: float = 9e-3,
    layers: str = "2,12,22,29",
    seed: int = 1,
    device: Device = "cuda",
    model: Model = None,
) -> None:
    """Train for so many seconds, print acceptance on greedy texts that were held out, and write the head."""
    torch.manual_seed(seed)
    target = Target(model or cache_folder() / "smollm2", torch.device(device))
    parts = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    ids, marks = (torch.cat([part[name] for part in parts]).to(target.device) for name in ("ids", "marks"))
    held = max(2, min(256, len(ids) // 8))
    counts = torch.bincount(ids[held:][marks[held:] > 0].long(), minlength=len(target.embed))
    order, known = counts.argsort(descending=True, stable=True), ids[:held][marks[:held] > 0].long()
    sizes = [size for size in SIZES if float(torch.isin(known, order[:size]).float().mean()) >= COVERED]
    head = Head(target, tuple(map(int, layers.split(","))), order[: (sizes or SIZES[-1:])[0]].sort().values)
    head = head.to(target.device)
    matrices = [w for name, w in head.weights.items() if w.dim() == 2 and name != "lm_head"]
    others = [w for name, w in head.weights.items() if w.dim() != 2 or name == "lm_head"]
    optimisers: list[tuple[torch.optim.Optimizer, float]] = [
        (torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"), rate),
        (torch.optim.AdamW(others, lr=0.3 * rate, betas=(0.9, 0.95), weight_decay=0.0), 0.3 * rate),
    ]
    length, started, shown, step = ids.shape[1], perf_counter(), 0.0, 0
    seen, rope = masks((length - steps) // 8 * 8, steps, target.device), target.rope(length + 8)
    while (passed := (perf_counter() - started) / seconds) < 1:
        rows = held + torch.randint(len(ids) - held, (batch,)).to(target.device)
        loss, shares = unroll(head, ids[rows].long(), marks[rows] > 0, seen, rope)
        for optimiser, full in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = full * min(1.0, (step + 1) / 30, (1 - passed) / LAST)
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        if not bool(loss.isfinite()):
            raise typer.BadParameter(f"the loss is {float(loss)} at step {step}; allowed: a smaller --rate")
        for optimiser, _ in optimisers:
            optimiser.step()
        step += 1
        if perf_counter() - started - shown > seconds / 12:
            shown = perf_counter() - started
            print(f"{shown:6.0f} s, step {step}: loss {float(loss.detach()):.2f}, {1 + sum(shares):.2f} tokens a round")
    with torch.no_grad():
        tested = [
            unroll(head, ids[i : i + 16].long(), marks[i : i + 16] == 2, seen, rope)[1] for i in range(0, held, 16)
        ]
    accepted = [sum(column) / len(tested) for column in zip(*tested, strict=True)]
    print(f"held-out greedy texts: {1 + sum(accepted):.2f} tokens a round of {steps} draft tokens")
    write(head, out, {"steps": step, "tokens_a_step": batch * length, "texts": ids.numel(), "accepted": accepted})


if __name__ == "__main__":
    in_one_line(app)
