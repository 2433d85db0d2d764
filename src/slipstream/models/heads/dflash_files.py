"""Reads heads of DFlash, DFlash 2 and DSpark, in the layouts of their authors and in that of `speculators`.

The authors number hidden states by the layer that they leave, `speculators` by the layer that they enter.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from slipstream.checks import is_whole
from slipstream.errors import UsageError
from slipstream.models.heads.dflash import (
    CandidateChain,
    Chain,
    Confidence,
    DFlashBackend,
    DFlashLayer,
    DFlashNetwork,
    DFlashWeights,
    LocalMix,
    MarkovChain,
)
from slipstream.models.heads.head_files import (
    COMPUTED,
    NOT_EAGLE3,
    HeadFiles,
    check_settings,
    check_size,
    layer_settings,
    windows_of,
)
from slipstream.models.heads.head_kinds import DFLASH, DFLASH2, DSPARK, FEATURES
from slipstream.models.heads.head_tensors import (
    TensorReader,
    after_attention,
    output_layer,
    own_embedding,
    projections,
    token_ids_of,
)
from slipstream.models.heads.network import HeadConfig, Linear
from slipstream.models.loaded import Loaded

# as `head_files.COMPUTED`
COMPUTED_HERE: dict[str, tuple[Any, ...]] = {
    **COMPUTED,
    **NOT_EAGLE3,
    "projector_type": (DFLASH,),
    "shift_label": (False,),
    "causal": (False,),
    "is_causal": (False,),
    "input_embedding_scale": (1,),
    "output_multiplier": (1,),
    "final_logit_softcapping": (None,),
}
# ModelOpt's flag that DSpark scores the last place of a block, too
COMPUTED_OF_DSPARK = {"projector_type": (DSPARK,), "shift_label": (True,)}
MARKOV_KINDS = "vanilla", "gated", "rnn"


def read_dflash(files: HeadFiles, tensors: Mapping[str, Tensor], target: Loaded) -> DFlashBackend:
    """A head of DFlash, DFlash 2 or DSpark for a target."""
    check_settings(files, COMPUTED_HERE | (COMPUTED_OF_DSPARK if files.kind == DSPARK else {}))
    block_size = _whole(files, "block_size", 16, 2, 255)
    mask_token = _whole(files, "mask_token_id", None, 0, target.backend.vocab_size - 1)
    config = _config(files, tensors, target)
    network = DFlashNetwork(config, _weights(files, tensors, config, target))
    return DFlashBackend(network, mask_token, block_size, 0 if _anchor_drafts(files) else 1)


def _anchor_drafts(files: HeadFiles) -> bool:
    """True if the newest token's place in a block scores the token after it.

    Raises `UsageError` if that is unclear: early versions of `speculators` wrote DSpark heads without the flag.
    """
    drafts: bool | None = files.flags.get("sample_from_anchor")
    if drafts is None and files.kind == DSPARK and files.is_of_speculators:
        raise UsageError(f"draft head {files.source!r}: config.json has no sample_from_anchor; allowed: true or false")
    return files.kind == DSPARK if drafts is None else drafts


def _whole(files: HeadFiles, name: str, default: int | None, low: int, high: int) -> int:
    value: Any = files.flags.get(name, default)
    if not is_whole(value, low, high):
        raise UsageError(f"draft head {files.source!r} has {name}={value!r}; allowed: {low} to {high}")
    return value


def _config(files: HeadFiles, tensors: Mapping[str, Tensor], target: Loaded) -> HeadConfig:
    layer, target_config = files.layer, target.backend.model.config.get_text_config()  # type: ignore[attr-defined]
    check_size(files, target, "hidden_size", layer["hidden_size"], target_config.hidden_size)
    check_size(files, target, "vocab_size", layer["vocab_size"], target.backend.vocab_size)
    return HeadConfig(
        layers=_layers(files, target_config.num_hidden_layers, target.name),
        target_hidden_size=layer["hidden_size"],
        token_ids=token_ids_of(files, tensors, target.backend.vocab_size),
        **layer_settings(files, target),
    )


def _layers(files: HeadFiles, count: int, target: str) -> tuple[int, ...]:
    """The layers whose inputs are the features; if the files name none, those of the authors' code."""
    entering = files.settings.get("aux_hidden_state_layer_ids")
    leaving = files.flags.get("target_layer_ids")
    if entering is None and leaving is None and not files.is_of_speculators:
        last = files.layer["num_hidden_layers"] - 1
        leaving = [round(1 + i * (count - 4) / last) for i in range(last + 1)] if last else [count // 2]
    named, shift = (leaving, 1) if entering is None else (entering, 0)
    low, high = -shift, count - 1 - shift
    if not isinstance(named, list) or not named or not all(is_whole(i, low, high) for i in named):
        raise UsageError(
            f"draft head {files.source!r} reads layers {named!r} of its target; {target!r} has {count}, allowed: a "
            f"list of numbers from {low} to {high}"
        )
    return tuple(i + shift for i in named)


def _weights(files: HeadFiles, tensors: Mapping[str, Tensor], config: HeadConfig, target: Loaded) -> DFlashWeights:
    model: Any = target.backend.model  # type: ignore[attr-defined]
    read = TensorReader(files, tensors, target.backend.device)
    size, embedding_layer = config.hidden_size, model.get_input_embeddings()
    # without the factor that some models apply to their embedding
    embed = (
        partial(embedding, weight=embedding_layer.weight)
        if isinstance(embedding_layer, nn.Embedding)
        else embedding_layer
    )
    chain = _chain(files, read, config)
    weights = DFlashWeights(
        fc=read.product({FEATURES: size}, len(config.layers) * size),
        feature_norm=read("hidden_norm.weight", size),
        layers=[_layer(files, read, config, i) for i in range(files.layer["num_hidden_layers"])],
        final_norm=read("norm.weight", size),
        embed=own_embedding(read, config) or embed,
        lm_head=output_layer(read, config, target),
        chain=chain,
        confidence=_confidence(files, read, size, chain) if files.kind == DSPARK else None,
    )
    read.check_all_read()
    return weights


def _chain(files: HeadFiles, read: TensorReader, config: HeadConfig) -> Chain | None:
    """The chain that corrects the scores of a place by the tokens before it; None for DFlash."""
    size, vocab_size, flags = config.hidden_size, config.vocab_size, files.flags
    if files.kind == DFLASH2:
        if config.token_ids is not None:
            raise UsageError(f"draft head {files.source!r} of type {DFLASH2!r} has d2t; allowed: the whole vocabulary")
        rank, name = _whole(files, "selector_rank", 256, 1, 1 << 16), "candidate_selector."
        return CandidateChain(
            before=read(f"{name}predecessor_codebook", vocab_size, rank),
            after=read(f"{name}successor_codebook", vocab_size, rank),
            project=read.product({f"{name}hidden_projection.weight": rank}, size),
            count=_whole(files, "selector_top_k", 16, 1, vocab_size),
        )
    rank = _whole(files, "markov_rank", 256, 0, 1 << 16) if files.kind == DSPARK else 0
    if not rank:
        return None
    kind, name = flags.get("markov_head_type", MARKOV_KINDS[0]), "markov_head."
    if kind not in MARKOV_KINDS:
        allowed = ", ".join(map(repr, MARKOV_KINDS))
        raise UsageError(f"draft head {files.source!r} has markov_head_type={kind!r}; allowed: {allowed}")

    def with_bias(part: str, outputs: int, inputs: int) -> Linear:
        return partial(
            linear,
            weight=read(f"{name}{part}.weight", outputs, inputs),
            bias=read(f"{name}{part}.bias", outputs),
        )

    return MarkovChain(
        tokens=read(f"{name}markov_w1.weight", vocab_size, rank),
        add=read.product({f"{name}markov_w2.weight": config.draft_vocab_size}, rank),
        gate=with_bias("gate_proj", rank, size + rank) if kind == "gated" else None,
        joint=with_bias("joint_proj", 3 * rank, size + 2 * rank) if kind == "rnn" else None,
        token_ids=None if config.token_ids is None else config.token_ids.to(read.device),
    )


def _confidence(files: HeadFiles, read: TensorReader, size: int, chain: Chain | None) -> Confidence | None:
    """DSpark's estimate of acceptance, if it makes one."""
    flags, name = files.flags, "confidence_head.proj."
    if not flags.get("enable_confidence_head", f"{name}weight" in read.tensors):
        return None
    tokens = chain.tokens if isinstance(chain, MarkovChain) else None
    reads_tokens = flags.get("confidence_head_with_markov", tokens is not None)
    if reads_tokens and tokens is None:
        raise UsageError(
            f"draft head {files.source!r} has confidence_head_with_markov={reads_tokens!r} and markov_rank=0; allowed: "
            "False, or a rank of at least 1"
        )
    seen = tokens if reads_tokens else None
    width = size + (0 if seen is None else seen.shape[1])
    return Confidence(read(f"{name}weight", 1, width), read(f"{name}bias", 1), seen)


def _mix(files: HeadFiles, read: TensorReader, size: int, name: str) -> LocalMix | None:
    if files.kind != DFLASH2:
        return None
    taps, group = _whole(files, "conv_kernel_size", 2, 1, 256), _whole(files, "conv_group_size", 16, 1, size)
    if size % group:
        raise UsageError(f"draft head {files.source!r} has conv_group_size={group}; allowed: divisors of {size}")
    return LocalMix(
        base=read(f"{name}.base_kernel", 2, taps, size),
        project=read.product({f"{name}.kernel_projection.weight": 2 * taps * (size // group)}, size),
    )


def _layer(files: HeadFiles, read: TensorReader, config: HeadConfig, number: int) -> DFlashLayer:
    name, window, size = f"layers.{number}.", windows_of(files)[number], config.hidden_size
    return DFlashLayer(
        query=read.product(projections(config, name, "q"), size),
        key_value=read.product(projections(config, name, "kv"), size),
        block_norm=read(f"{name}input_layernorm.weight", size),
        query_norm=read(f"{name}self_attn.q_norm.weight", config.head_dim),
        key_norm=read(f"{name}self_attn.k_norm.weight", config.head_dim),
        window=window,
        is_causal=window is not None and _windows_are_causal(files),
        attention_mix=_mix(files, read, size, f"{name}attention_conv"),
        mlp_mix=_mix(files, read, size, f"{name}mlp_conv"),
        **after_attention(read, config, name),
    )


def _windows_are_causal(files: HeadFiles) -> bool:
    """True if a block's rows see only earlier rows in layers with a window, as in `speculators`."""
    sees_all = files.settings.get("sliding_window_non_causal", files.kind == DFLASH2)
    return files.is_of_speculators and not sees_all
