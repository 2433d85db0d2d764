"""The folder of a draft head and its config.json, as each trainer writes it.

Nothing in it is trusted: flags of other networks and unknown settings are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import resources
from os.path import isdir
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from slipstream.checks import UNREADABLE, is_number, is_whole
from slipstream.errors import UsageError, one_line
from slipstream.models.decoder.rotary import frequencies
from slipstream.models.heads.head_kinds import (
    ASSISTANT,
    EAGLE3,
    PARD,
    kind_of,
    label_of,
    labeled,
    own_name,
)
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.weights.model_files import is_gguf
from slipstream.models.weights.named_models import hub_name
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.safetensors_files import file_of

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# settings of heads: if a hub repository has none of them, more than one layer and no known architecture, its weights
# are not fetched, since it cannot be a head
HINTS = ("draft_vocab_size", "eagle_config", "dflash_config", "block_size")
MIDDLE = "midlayer.self_attn."  # prefix in the authors' EAGLE-3 heads, which have one layer
EMBEDDED_NAME = "smollm2_head"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
NESTED_FLAGS = ("eagle_config", "dflash_config")
NESTED = ("transformer_layer_config", *NESTED_FLAGS, "speculators_config")
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
SIZES = (*NEEDED, "num_key_value_heads", "head_dim")
LARGEST, MOST_LAYERS = 1 << 40, 1000
# settings that choose between networks, and the supported values; null means the default. The last two lines are
# ModelOpt's
COMPUTED: dict[str, tuple[Any, ...]] = {
    **{"attention_bias": (False,), "mlp_bias": (False,), "hidden_act": ("silu",), "hidden_activation": ("silu",)},
    **{"attention_mode": ("gqa", "mha"), "partial_rotary_factor": (1,)},
    **{"use_aux_hidden_state": (True,), "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,)},
    **{"use_mtp_layernorm": (False,), "eh_proj_before_attn": (False,), "parallel_draft_step": (0, 1)},
}
# flags of EAGLE-3, refused in heads of other kinds unless they are off
NOT_EAGLE3 = dict.fromkeys(("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc"), (False,))
# an unknown setting with one of these words in its name may change the computation, and is refused
SWITCH = re.compile(
    r"(?:^|_)(?:(?:layer)?norm|residual|multiplier|scal(?:e|ing|ar)|(?:soft)?cap(?:ping)?|clip|rotary|rope|window|causal"
    r"|interleaved?|act(?:ivation)?|attn|attention)(?:_|$)"
)
# unless it concerns training or a library, or is a size, which the tensors' shapes show
NO_SWITCH = re.compile(r"dropout|loss|grad|train|init|eps|implementation|backend|kernel|_(?:heads?|dim)$")
# or is handled elsewhere, or affects a head only through tensors, which are checked
KNOWN_SWITCHES = frozenset(
    {
        *NOT_EAGLE3,
        *("causal", "is_causal"),
        *("sliding_window", "use_sliding_window", "sliding_window_non_causal", "max_window_layers", "rope_theta"),
        *("norm_topk_prob", "qk_norm", "use_qk_norm", "attn_output_gate", "full_attention_interval"),
        *("routed_scaling_factor", "next_layer_regular"),
    }
)
WINDOWED = "sliding_attention"
ROPE_KINDS = ("default", "linear", "llama3", "yarn")  # types of rotary positions; others depend on the length of a text
MROPE = "mrope"  # for text with images; without images it rotates as the default does


def embedded_head() -> Path:
    """The folder of the head that comes with the package, trained for the embedded model."""
    return Path(str(resources.files("slipstream").joinpath("data/smollm2_head")))


@dataclass(frozen=True)
class HeadFiles:
    """A head's folder."""

    source: str  # as the user named it
    folder: str
    settings: Mapping[str, Any]  # config.json's
    kind: str = EAGLE3  # may be an unsupported one
    model: Any = None  # an assistant that the caller has loaded; it has no folder
    options: LoadOptions = field(default_factory=LoadOptions)  # how the head is loaded

    @property
    def layer(self) -> Mapping[str, Any]:
        """The settings of the decoder layer, which `speculators` nests."""
        nested: Mapping[str, Any] = self.settings.get("transformer_layer_config", self.settings)
        return nested

    @property
    def flags(self) -> Mapping[str, Any]:
        """The settings of the head; ModelOpt and DFlash's authors nest them."""
        nested = [part for name in NESTED_FLAGS for part in self.settings.get(name, {}).items()]
        return {**self.settings, **{name: value for name, value in nested if value is not None}}

    @property
    def is_of_speculators(self) -> bool:
        """True if `speculators` wrote the files; it numbers hidden states by the layer that they enter."""
        return "speculators_model_type" in self.settings

    def trained_for(self, target: str) -> str | None:
        """The hub id of the model that the head was trained for, if `target` is the hub id of another model.

        If one name begins with the other, they mean the same model: one may be quantized, for example.
        """
        verifier = self.settings.get("speculators_config", {}).get("verifier")
        named = str(verifier.get("name_or_path")) if isinstance(verifier, dict) else ""
        if not all(HUB_ID.fullmatch(name) and not Path(name).exists() for name in (named, target)):
            return None
        model, target_model = (name.partition("/")[2].lower() for name in (named, target))
        return None if model.startswith(target_model) or target_model.startswith(model) else named


def head_files(source: Any, options: LoadOptions) -> HeadFiles | None:
    """The files of a head that the user has named, or an assistant; None if this is something else."""
    if labeled(type(source).__name__) == ASSISTANT:
        named = source.config.name_or_path or type(source).__name__
        return HeadFiles(named, "", source.config.to_dict(), ASSISTANT, source, options)
    files = _config_files(source, options)
    if files is None:
        return None
    stored = _tensor_names(files, options)
    names = {own_name(name) for name in stored}
    kind = kind_of(files.settings, names)
    if kind is None:
        return None
    settings = dict(files.settings)
    if any(MIDDLE in name for name in stored) and not any(name.startswith("layers.1.") for name in names):
        settings["num_hidden_layers"] = 1  # the authors' reader always builds one layer
    shown = EMBEDDED_NAME if Path(files.folder) == embedded_head() else files.source
    return HeadFiles(shown, files.folder, settings, kind, options=options)


def trained_kind(draft: str) -> str | None:
    """The kind of head that a draft model is, `PARD`, or None for an ordinary model."""
    files = _config_files(draft, LoadOptions())
    head = head_files(draft, LoadOptions())
    return head.kind if head is not None else PARD if files is not None and "pard_token" in files.settings else None


def _config_files(source: Any, options: LoadOptions) -> HeadFiles | None:
    """The folder and config.json of any model or head that the user named; None if there is no config.json."""
    if not isinstance(source, str) and not hasattr(source, "__fspath__"):
        return None
    name = str(source)
    folder = name if isdir(name) else str(embedded_head()) if name == EMBEDDED_NAME else None
    if folder is None:
        # a file path may look like a hub id, and a GGUF file on the hub is not a head
        if not HUB_ID.fullmatch(name) or is_gguf(name) or hub_name(name) is not None:
            return None
        folder = resolve(name, options.files)
    file = file_of(folder, "config.json", options.files)
    if file is None:
        return None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except UNREADABLE:
        return None  # the reader of models reports what is wrong
    if not isinstance(settings, dict):
        return None
    settings = {key: value for key, value in settings.items() if key not in NESTED or value is not None}
    if wrong := next((key for key in NESTED if not isinstance(settings.get(key, {}), dict)), None):
        raise UsageError(f"draft head {name!r}: config.json has {wrong}={settings[wrong]!r}; allowed: an object")
    return HeadFiles(name, folder, settings)


def _tensor_names(files: HeadFiles, options: LoadOptions) -> Collection[str]:
    """The names of the tensors in a folder, as they are stored."""
    from safetensors import safe_open

    settings = files.settings
    is_hinted = label_of(settings) or settings.get("num_hidden_layers") == 1 or any(hint in settings for hint in HINTS)
    path = weights_file(files.folder, options) if is_hinted or isdir(files.folder) else None
    if path is None:
        return ()
    try:
        if path.suffix != ".safetensors":
            tensors = torch.load(path, map_location="meta", weights_only=True, mmap=is_zipfile(path))
            return [name for name in tensors if isinstance(name, str)]
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except Exception:  # any class; the reader of models reports what is wrong
        return ()


def weights_file(folder: str, options: LoadOptions) -> Path | None:
    """The file of a head's tensors."""
    return next((path for name in WEIGHTS if (path := file_of(folder, name, options.files)) is not None), None)


def check_settings(files: HeadFiles, computed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `UsageError` for impossible sizes, and for settings of a network other than the one computed here.

    computed: as `COMPUTED`, for this kind of head.
    """
    layer, source = files.layer, files.source
    for name in SIZES:
        size = layer.get(name)
        if size is None and name in NEEDED:
            raise UsageError(f"draft head {source!r}: config.json has no {name}; allowed: a whole number")
        largest = MOST_LAYERS if name == "num_hidden_layers" else LARGEST
        if size is not None and not is_whole(size, 1, largest):
            raise UsageError(f"draft head {source!r} has {name}={size!r}; allowed: a whole number from 1 to {largest}")
    eps = layer.get("rms_norm_eps", 1e-6)
    if not is_number(eps) or eps <= 0:
        raise UsageError(f"draft head {source!r} has rms_norm_eps={eps!r}; allowed: a number above 0")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(layer.get(name) or {}, dict):
            raise UsageError(f"draft head {source!r} has {name}={layer[name]!r}; allowed: an object")
    theta = rope_theta(layer)
    if not is_number(theta, 1, LARGEST):
        raise UsageError(f"draft head {source!r} has rope_theta={theta!r}; allowed: a number from 1 to {LARGEST}")
    nested = [part for name in NESTED_FLAGS for part in files.settings.get(name, {}).items()]
    for name, value in [*rope_settings(layer).items(), *files.settings.items(), *layer.items(), *nested]:
        if name in computed and value is not None and value not in computed[name]:
            allowed = ", ".join(map(repr, computed[name]))
            raise UsageError(f"draft head {source!r} has {name}={value!r}; allowed: {allowed}")
    for name, value in [*files.settings.items(), *layer.items(), *nested]:
        if name not in computed and _is_unknown_switch(name, value):
            raise UsageError(
                f"draft head {source!r} has {name}={value!r}, which is unknown and may change what it "
                "computes; allowed: heads without it"
            )


def _is_unknown_switch(name: str, value: Any) -> bool:
    """True if a setting may change what a head computes. False, 0, a factor of 1, lists and objects do not."""
    if name in KNOWN_SWITCHES or not SWITCH.search(name) or NO_SWITCH.search(name):
        return False
    return value is True or isinstance(value, str) or (is_number(value) and value not in (0, 1))


def windows_of(files: HeadFiles) -> list[int | None]:
    """The number of positions that each layer's attention sees; None for all.

    Raises `UsageError` if that is unclear: only some readers apply a window that `layer_types` does not mention.
    """
    layer, source, count = files.layer, files.source, files.layer["num_hidden_layers"]
    window, kinds = layer.get("sliding_window"), layer.get("layer_types")
    if kinds is None:
        if window is not None and layer.get("use_sliding_window", True):
            raise UsageError(f"draft head {source!r} has sliding_window={window!r} without layer_types; allowed: both")
        return [None] * count
    allowed = (WINDOWED, "full_attention")
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in allowed for kind in kinds):
        raise UsageError(
            f"draft head {source!r} has layer_types={kinds!r}; allowed: {WINDOWED!r} or 'full_attention' for each of "
            f"its {count} layers"
        )
    if WINDOWED in kinds and (not isinstance(window, int) or window < 1):
        raise UsageError(f"draft head {source!r} has sliding_window={window!r}; allowed: 1 or more")
    return [window if kind == WINDOWED else None for kind in kinds]


def check_size(files: HeadFiles, target: Loaded, name: str, size: int, expected: int) -> None:
    """Raise `UsageError` unless a head has the size of its target."""
    if size != expected:
        raise UsageError(
            f"draft head {files.source!r} is another target's: its {name} is {size}, that of {target.name!r} {expected}"
        )


def layer_settings(files: HeadFiles, target: Loaded) -> dict[str, Any]:
    """The fields of a `HeadConfig` that are read in the same way for all kinds of heads."""
    layer, heads = files.layer, files.layer["num_attention_heads"]
    size = layer.get("head_dim") or layer["hidden_size"] // heads
    inverse_frequencies, rotation_scale = scaled_frequencies(files.source, layer, size)
    return {
        "hidden_size": layer["hidden_size"],
        "intermediate_size": layer["intermediate_size"],
        "num_heads": heads,
        "num_key_heads": layer.get("num_key_value_heads") or heads,
        "head_dim": size,
        "vocab_size": target.backend.vocab_size,
        "eps": layer.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta(layer),
        "max_length": target.backend.max_length,
        "inverse_frequencies": inverse_frequencies,
        "rotation_scale": rotation_scale,
    }


def rope_settings(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """A decoder layer's settings of rotary positions."""
    return layer.get("rope_parameters") or layer.get("rope_scaling") or {}


def rope_theta(layer: Mapping[str, Any]) -> float:
    """The base of the frequencies. layer: settings of a head's decoder layer."""
    theta: float = rope_settings(layer).get("rope_theta") or layer.get("rope_theta") or 10000.0
    return theta


def scaled_frequencies(source: str, layer: Mapping[str, Any], size: int) -> tuple[Tensor | None, float]:
    """[D / 2] inverse frequencies, None without scaling, and the factor of cosines and sines.

    layer: settings of a head's decoder layer; size: of an attention head. Raises `UsageError` for unsupported types of
    scaling, and for missing settings.
    """
    rope = rope_settings(layer)
    parameters = {name: value for name, value in rope.items() if name != "type"}
    kind = rope.get("rope_type", rope.get("type", "default"))
    parameters["rope_type"] = kind = "default" if kind == MROPE else kind
    if kind not in ROPE_KINDS:
        allowed = ", ".join(map(repr, ROPE_KINDS))
        raise UsageError(f"draft head {source!r} has rope_type={kind!r}; allowed: {allowed}")
    if kind == "default":
        return None, 1.0
    parameters["rope_theta"] = rope_theta(layer)
    parameters.setdefault("original_max_position_embeddings", layer.get("max_position_embeddings"))
    try:
        return frequencies(parameters, size)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(
            f"draft head {source!r} has rope_type={kind!r} without what it needs: {one_line(error)}"
        ) from error
