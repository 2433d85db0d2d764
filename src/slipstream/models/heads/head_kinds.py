"""Recognizes the kind of draft head in a folder.

The tensors decide; config.json decides only between kinds with the same tensors, because it is unreliable: the authors'
own EAGLE-3 heads declare themselves Llama models, and one of them declares 40 layers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

FEATURES = "fc.weight"  # a tensor that every head has and no model has
MASK_FEATURE = "mask_hidden"
ASSISTANT, DFLASH, DFLASH2, DSPARK = "assistant", "dflash", "dflash2", "dspark"
EAGLE1, EAGLE3 = "eagle1", "eagle3"
PEAGLE = "peagle"
PARD = "pard"  # an ordinary model that drafts with mask tokens
SIGNS = {  # the kind of head by a tensor that other kinds lack; the first match decides
    "prefix_gru.weight_ih_l0": "domino",
    "layer_fusion_weights": "dflare",
    "candidate_selector.predecessor_codebook": DFLASH2,
    "markov_head.markov_w1.weight": DSPARK,
    MASK_FEATURE: PEAGLE,
    "layers.0.hidden_norm.weight": EAGLE3,
    "hidden_norm.weight": DFLASH,
}
PLAIN = {  # supported kinds, by the kind whose tensors they include
    **dict.fromkeys((EAGLE3, PEAGLE), EAGLE3),
    **dict.fromkeys((DFLASH, DFLASH2, DSPARK), DFLASH),
}
LABELS = {  # the kind by the architecture in config.json; the first match decides
    "Gemma4DSpark": "DSpark of Gemma 4",
    "Gemma4Eagle3": "Eagle3 of Gemma 4",
    "Eagle3Deepseek": "Eagle3 of DeepSeek",
    "^Gemma4(Unified)?AssistantForCausalLM$": ASSISTANT,
    "^MedusaModel$": "medusa",
    "^MLPSpeculator": "mlp_speculator",
    "Domino": "domino",
    "DFlare": "dflare",
    "DSpark": DSPARK,
    "DFlash2": DFLASH2,
    "DFlash": DFLASH,
    "PEagle": PEAGLE,
    "^Eagle3(Llama|Speculator|DraftModel)|(CausalLM|Qwen3)Eagle3": EAGLE3,
}
# the kind by a setting, where config.json names no architecture
UNNAMED = {"medusa_num_heads": "medusa", "hydra_num_heads": "hydra"}
PREFIXES = (  # parts of tensor names that some trainers write, and their replacements
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\.(?=\D)"), "layers.0."),
    (re.compile(r"^midlayer\."), "layers."),  # ModelOpt's heads of several layers
    (re.compile(r"^(?=markov_w[12]\.|(?:gate|joint)_proj\.)"), "markov_head."),
    (re.compile(r"^confidence_proj\."), "confidence_head.proj."),
)


def kind_of(settings: Mapping[str, Any], names: Collection[str]) -> str | None:
    """The kind of a head by its settings and the names of its tensors; None for a model."""
    sign = next((kind for name, kind in SIGNS.items() if name in names), None)
    label = label_of(settings)
    if label is not None and PLAIN.get(label) in (None, sign):
        return label
    return sign or label or (EAGLE1 if FEATURES in names else None)


def label_of(settings: Mapping[str, Any]) -> str | None:
    """The kind that config.json names, which may be unsupported."""
    if "speculators_model_type" in settings:
        return str(settings["speculators_model_type"])
    projector = settings.get("dflash_config", {}).get("projector_type", DFLASH)
    if isinstance(projector, str) and projector != DFLASH:
        return projector
    architectures = settings.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    labels = [label for name in names if isinstance(name, str) and (label := labeled(name))]
    return next(iter(labels), next((kind for key, kind in UNNAMED.items() if key in settings), None))


def labeled(architecture: str) -> str | None:
    """The kind that an architecture's name means."""
    return next((kind for pattern, kind in LABELS.items() if re.search(pattern, architecture)), None)


def own_name(stored: str) -> str:
    """A tensor's name as heads of `speculators` and DeepSpec have it."""
    for pattern, replacement in PREFIXES:
        stored = pattern.sub(replacement, stored)
    return stored
