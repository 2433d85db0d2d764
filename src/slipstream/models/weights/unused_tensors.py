"""Lists the tensors that a model may leave unused. Any other unused tensor means a different model: it is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable

from slipstream.errors import SlipstreamError

# patterns to search for in names
HARMLESS = tuple(
    map(
        re.compile,
        (
            # computed from the configuration: angles of rotations, counted positions, masks that hide later tokens
            r"\brot\w*\.(?:\w*inv_freq|cos_cached|sin_cached)$",
            r"\b(?:attn_rot_embd|rope\.freqs|position_ids)(?:\.weight)?$",
            r"\b(?:attn|attention)\.(?:masked_bias|causal_mask)$|\battn\.attention\.bias$",
            # scales of keys and values in 8 bits: the cache keeps them in the model's precision
            r"\b(?:self_attn|attention|attn)\.(?:\w+_proj\.)?(?:k|v|kv)_scale$",
            # layers that predict further tokens, used only for drafts
            r"\b(?:mtp|nextn)\w*\.",
            # towers for images and sounds, which text does not use; the short names are GGUF's
            r"\b(?:visual|vision_\w+|audio_\w+|embed_(?:vision|audio)|multi_modal_projector|mm_projector)\.|^(?:v|a|mm)\.",
            # output layers of reward models, classifiers and rerankers
            r"^(?:v_head|value_head|score|classifier)\.|^cls(?:\.output)?\.weight$",
        ),
    )
)
LAYER = re.compile(r".*?\b(?:layers|blk)\.\d+\.")
OF_MTP = re.compile(r"(?:nextn\.)?(?:eh_proj|enorm|hnorm|shared_head\w*)\b")  # in such a layer only


def refuse_unused(source: str, names: Iterable[str], ignored: Iterable[str] = ()) -> None:
    """Raise `SlipstreamError` if the model leaves tensors unused that may matter.

    names: of all unused tensors; ignored: further patterns, which the model's own class names.
    """
    unused, by_class = sorted(names), [re.compile(pattern) for pattern in ignored]
    layers = [(name, match[0]) for name in unused if (match := LAYER.match(name))]
    mtp_layers = tuple({layer for name, layer in layers if OF_MTP.match(name, len(layer))})
    matter = [
        name
        for name in unused
        if not name.startswith(mtp_layers) and not any(pattern.search(name) for pattern in (*HARMLESS, *by_class))
    ]
    if matter:
        raise SlipstreamError(
            f"model {source!r}: {len(matter)} tensors of the file are not used, first {matter[0]}; allowed: tensors "
            "of its architecture (if the model is right without them, load it with transformers and pass the object)"
        )
