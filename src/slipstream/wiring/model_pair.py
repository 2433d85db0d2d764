"""A target and perhaps a draft model with their KV caches and their lock, and a fingerprint of what texts depend on."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field, replace
from os.path import isdir
from typing import Any

import torch
from torch import Tensor

from slipstream import drafters
from slipstream.checks import expanded, is_whole
from slipstream.config import DecoderConfig
from slipstream.core.interfaces import DraftScorer, set_attended_lengths
from slipstream.core.kv_slots import Shapes
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.session import PromptReader, Session
from slipstream.core.types import Row
from slipstream.drafters.cross_vocabulary.bridged_session import BridgedSession
from slipstream.drafters.model.parallel_scorer import MOST, ParallelScorer
from slipstream.drafters.model.restricted_scorer import RestrictedScorer
from slipstream.drafters.model.windowed_session import WindowedSession
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.backend_capabilities import (
    HiddenStates,
    LayerSubsets,
    ParallelDrafts,
    PreparedForwards,
    Releasing,
)
from slipstream.models.cpu.block_linear import block_linears
from slipstream.models.cpu.quantized_linear import rounded_activations
from slipstream.models.exclusive_use import ExclusiveUse
from slipstream.models.generation_settings import ModelSettings
from slipstream.models.heads.features import FeatureReader
from slipstream.models.heads.head_backend import HeadBackend, HeadSession
from slipstream.models.layouts import make_session
from slipstream.models.load import load
from slipstream.models.loaded import MTP, PLAN, Loaded, LoadOptions, is_loaded, is_toy, refuse_unused
from slipstream.models.model_size import larger, num_weights_read
from slipstream.models.weights.gguf_file import read_header
from slipstream.models.weights.hub_files import local_file
from slipstream.models.weights.model_files import EMBEDDED, NO_DRAFT, is_gguf
from slipstream.models.weights.named_models import named_model
from slipstream.models.weights.resolve import place_of
from slipstream.reproducibility.calibration import Calibration
from slipstream.reproducibility.calibration_cache import choose_shapes, remembered_agreement, remembered_draft_times
from slipstream.reproducibility.timing import TEXT, DraftTimes, time_drafts
from slipstream.tokenization.tokenizer import TokenizerDetails
from slipstream.tokenization.vocabulary_bridge import bridge_between
from slipstream.version import __version__

NOT_TIMED = DraftTimes()
OF_MODELS = ("draft_vocabulary", "draft_context")  # settings that draft heads do not have
QUANTIZED = 3  # of a draft model that was quantized at load, a forward reads about one byte in this many

log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class ModelPair:
    """Loaded models and their sessions."""

    target: Loaded
    draft: Loaded | None
    target_session: Session
    draft_session: Session | None
    calibration: Calibration | None  # of the target's forward shapes; None if nothing was measured
    # the draft model's session over rows of the target, if their vocabularies differ
    bridged: BridgedSession | None = None
    windowed: WindowedSession | None = None  # the draft model's session that reads a part of long prompts
    draft_times: DraftTimes = NOT_TIMED
    settings: ModelSettings = field(default_factory=ModelSettings)  # that the target brings
    threads: int = field(default_factory=torch.get_num_threads)  # with which the target's shapes were chosen

    @classmethod
    def load(
        cls, target: Any, draft: Any, config: DecoderConfig, tokenizer: Any, draft_tokenizer: Any = None
    ) -> ModelPair:
        """Load both and choose the target's forward shapes.

        Without a draft model, a target may draft with what it brings: the embedded model with its head, a short name
        with its draft model, others with MTP layers. draft="none" refuses these, too.
        """
        takes_none = isinstance(draft, str) and draft == NO_DRAFT
        target, draft = _inner(target), None if takes_none else _inner(draft)
        tokenizer = _tokenizer(tokenizer, "tokenizer")
        draft_tokenizer = _tokenizer(draft_tokenizer, "draft_tokenizer")
        if draft is None and draft_tokenizer is not None:
            raise UsageError("draft_tokenizer is given, but there is no draft model; allowed: with a draft model")
        refuse_unused(load_options_of(config), target, None if _is_mtp(draft) else draft)
        callers_models = [model for model in (target, draft) if isinstance(model, torch.nn.Module)]
        if not takes_none:
            _check_exists(draft, config)
        with ExclusiveUse(callers_models):  # they are tried and calibrated now
            loaded = _load_target(target, load_options_of(config), tokenizer)
            if draft_tokenizer is None and is_loaded(draft):
                draft_tokenizer = tokenizer
            if draft is None and not takes_none:
                draft = _at_hand(brought_draft(target, config), config)
            mtp_layers = None if draft is not None or takes_none else _brought_mtp(loaded, config)
            return cls._of_loaded(loaded, mtp_layers or load_draft(draft, config, loaded, draft_tokenizer), config)

    @classmethod
    def _of_loaded(cls, target: Loaded, draft: Loaded | None, config: DecoderConfig) -> ModelPair:
        draft_session = _draft_session(draft)
        bridged = _bridged(target, draft, draft_session, config)
        shapes, calibration = choose_shapes(target, config.reproducible, config.max_batch_size)
        if isinstance(target.backend, Releasing):
            target.backend.release()
        session = make_session(target.backend, shapes, shows_images=not isinstance(target.vision, str))
        _attach(draft, session)
        _prepare(target, config)
        _prepare(draft, config)
        windowed = _windowed(target, draft_session, bridged, config)
        settings = ModelSettings.of(target)
        pair = cls(target, draft, session, draft_session, calibration, bridged, windowed, settings=settings)
        return pair._with_draft_times(config.max_batch_size)

    def with_draft(self, draft: Any, config: DecoderConfig, tokenizer: Any = None) -> ModelPair:
        """A pair of this target, its cache included, and another draft model, or none."""
        tokenizer = _tokenizer(tokenizer, "draft_tokenizer")
        draft = None if isinstance(draft, str) and draft == NO_DRAFT else _inner(draft)
        return self._with_loaded_draft(load_draft(draft, config, self.target, tokenizer), config)

    def _with_loaded_draft(self, draft: Loaded | None, config: DecoderConfig) -> ModelPair:
        session = _draft_session(draft)
        _attach(draft, self.target_session)
        _prepare(draft, config)
        bridged = _bridged(self.target, draft, session, config)
        windowed = _windowed(self.target, session, bridged, config)
        pair = replace(self, draft=draft, draft_session=session, bridged=bridged, windowed=windowed)
        return pair._with_draft_times(config.max_batch_size)

    def current(self, config: DecoderConfig) -> ModelPair:
        """The models as their owners have them now.

        If nothing was changed, this pair. If only weights have other values, this pair as well, with empty caches,
        unless there are copies of them. A model that was changed otherwise is tried again, as if it were another one.
        With another number of threads, other shapes may agree: they are chosen again, and nothing cached is used.
        """
        changed = [loaded for loaded in self.loaded if loaded.view is not None and loaded.view.is_outdated()]
        if not changed:
            rewritten = [loaded.view for loaded in self.loaded if loaded.view and not loaded.view.has_same_weights()]
            if rewritten:
                self.forget()
            for view in rewritten:
                view.accept_weights()
            if self.threads == torch.get_num_threads():
                return self
            pair = self.with_shapes(config)
            pair.forget()
            return pair
        from slipstream.models.pretrained import wrap_again

        draft = self.draft
        if draft is not None and draft in changed:
            draft = wrap_again(draft, draft_options_of(config, self.target.backend.device))
        if self.target not in changed:
            return self._with_loaded_draft(draft, config).current(config)
        return self._of_loaded(wrap_again(self.target, load_options_of(config)), draft, config)

    def num_writes(self) -> int:
        """Number of in-place changes of the weights of models with owners."""
        return sum(loaded.view.num_writes() for loaded in self.loaded if loaded.view is not None)

    def with_shapes(self, config: DecoderConfig) -> ModelPair:
        """A pair of these models and caches that keeps to the forward shapes of other settings."""
        shapes, calibration = choose_shapes(self.target, config.reproducible, config.max_batch_size)
        session = self.target_session.with_shapes(shapes)
        return replace(self, target_session=session, calibration=calibration, threads=torch.get_num_threads())

    def _with_draft_times(self, max_rows: int) -> ModelPair:
        """This pair with the time of drafts of up to `max_rows` rows, if the target's forwards were timed too."""
        scorer, draft, session = self.draft_scorer(), self.draft, self.draft_session
        if self.calibration is None or self.bridged is not None or scorer is None or draft is None or session is None:
            return replace(self, draft_times=NOT_TIMED)
        if draft.backend.device.type != "cpu" or draft.backend.max_length < 2 * TEXT:
            return replace(self, draft_times=NOT_TIMED)

        def measure() -> DraftTimes:
            session.reserve(max_rows, 2 * TEXT)
            times = time_drafts(scorer, max_rows)
            session.forget()
            if isinstance(draft.backend, Releasing):
                draft.backend.release()
                session.slot_states.clear()  # there are no such slots any more
            return times

        return replace(self, draft_times=remembered_draft_times(draft, measure, max_rows))

    @property
    def loaded(self) -> list[Loaded]:
        """The target, and the draft model if there is one."""
        return [self.target] if self.draft is None else [self.target, self.draft]

    def exclusive_use(self) -> ExclusiveUse:
        """The lock of these models."""
        return ExclusiveUse([model.backend if model.model is None else model.model for model in self.loaded])

    @property
    def shapes(self) -> Shapes:
        return self.target_session.shapes

    def set_attended_lengths(self) -> None:
        """Make the target attend to lengths as its shapes say; a decoder of other shapes may have changed that."""
        set_attended_lengths(self.target.backend, self.shapes.attended_unit, self.shapes.attended_lengths)

    def draft_scorer(self) -> DraftScorer | None:
        """The session of a draft model with the target's vocabulary.

        It may be wrapped in others, which score a part of the vocabulary only, or a whole draft at once.
        """
        session = self.windowed or self.draft_session
        if self.draft is None or session is None:
            return session
        restricted = self.draft.restricted
        scorer: DraftScorer = session
        if restricted is not None and restricted.num_first <= self.target.backend.vocab_size:
            scorer = RestrictedScorer(session, restricted)
        if isinstance(self.draft.backend, ParallelDrafts):
            return ParallelScorer(scorer, self.draft.backend.mask_token, self.draft.backend)
        mask_token = parallel_mask(self.draft)
        if mask_token is None:
            return scorer
        # a head cannot go on after its own tokens: the target's features of them do not exist yet
        is_head = isinstance(self.draft.backend, HeadBackend)
        return ParallelScorer(scorer, mask_token, longest=MOST if is_head else MAX_DRAFT_TOKENS)

    @property
    def draft_reader(self) -> PromptReader | None:
        """The session that reads prompts for the draft model."""
        return self.bridged or self.windowed or self.draft_session

    def compare_copies(self) -> None:
        """Look at all weights of models with owners, of which there may be copies that no longer agree with them."""
        for loaded in self.loaded:
            if loaded.view is not None:
                loaded.view.compare_copies()

    def forget(self) -> None:
        for session in (self.target_session, self.draft_session):
            if session is not None:
                session.forget()

    def tokens_in_memory(self) -> tuple[int, int]:
        """Numbers of tokens that the caches hold in all their slots: the target's and the draft model's."""
        sessions = (self.target_session, self.draft_session)
        states = ([] if session is None else session.slot_states for session in sessions)
        target, draft = (sum(slot.valid(slot.row) for slot in slots if slot.row is not None) for slots in states)
        return target, draft

    @torch.inference_mode()
    def next_logits(self, row: Row) -> Tensor:
        """[V] logits of the target after a row's tokens."""
        self.target_session.reserve(1, len(row.tokens) + 1)
        nothing = torch.empty(1, 0, dtype=torch.int64, device=self.target.backend.device)
        return self.target_session.score([row], nothing, [0])[0, 0]


def fingerprint_of(target: Loaded, shapes: Shapes) -> str:
    """A name that is equal for decoders which write the same bytes for the same request and seed.

    It depends on weights, tokenizer, chat template, ends of texts, forward shapes and versions.
    """
    backend = target.backend
    weights = backend.weights_digest() if isinstance(backend, LayerSubsets) else target.name
    tokenizer = target.tokenizer
    parts = (
        target.fingerprint,
        weights,
        tokenizer.digest() if isinstance(tokenizer, TokenizerDetails) else type(tokenizer).__name__,
        target.end_ids,
        replace(shapes, alone=(), totals=()),  # which of the shapes that agree are used is a matter of speed
        backend.device.type,
        torch.__version__,
        __version__,
    )
    return "slip-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _load_target(target: Any, options: LoadOptions, tokenizer: Any) -> Loaded:
    try:
        return load(target, options, tokenizer)
    except SlipstreamError as error:
        from slipstream.models.heads.head_files import head_files

        if isinstance(target, str) and isdir(target) and head_files(target, options) is not None:
            raise UsageError(
                f"model {target!r} is a draft head; allowed: its target, with the head as draft"
            ) from error
        raise


def _is_mtp(draft: Any) -> bool:
    return isinstance(draft, str) and draft == MTP


def _inner(model: Any) -> Any:
    """A loaded model without wrappers; names as they are."""
    if not isinstance(model, torch.nn.Module):
        return model
    from slipstream.models.hf.model_view import unwrapped

    return unwrapped(model)


def _tokenizer(tokenizer: Any, name: str) -> Any:
    """A tokenizer that a caller passed as this argument, or None."""
    if tokenizer is None:
        return None
    from slipstream.tokenization.hf_tokenizer import tokenizer_in

    return tokenizer_in(tokenizer, name)


def _windowed(
    target: Loaded, session: Session | None, bridged: BridgedSession | None, config: DecoderConfig
) -> WindowedSession | None:
    """The session that skips a part of long prompts: with "auto" what exceeds the context; None if none is skipped."""
    length = config.draft_context
    if length not in ("auto", "full") and (session is None or bridged is not None):
        what = "but there is no draft model" if session is None else "but the draft model has another vocabulary"
        raise UsageError(f"draft_context={length!r}, {what}; allowed: 'auto' or 'full'")
    if session is None or bridged is not None or length == "full":
        return None
    if length == "auto" and session.backend.max_length >= target.backend.max_length:
        return None  # it holds whatever the target's context holds
    return WindowedSession(session, None if length == "auto" else int(length))


def _bridged(
    target: Loaded, draft: Loaded | None, session: Session | None, config: DecoderConfig
) -> BridgedSession | None:
    """The session that translates through bytes, if the two vocabularies differ."""
    if draft is None or session is None:
        return None
    from slipstream.tokenization.vocabulary import same_vocabulary  # transformers takes seconds to import

    if same_vocabulary(target, draft):
        return None
    if config.draft_vocabulary not in ("auto", "full"):
        raise UsageError(
            f"draft_vocabulary={config.draft_vocabulary!r} with a draft model of another vocabulary; "
            "allowed: 'auto' or 'full'"
        )
    sizes = target.backend.vocab_size, draft.backend.vocab_size
    return BridgedSession(session, bridge_between(target, sizes[0], draft, sizes[1]))


def brought_draft(target: Any, config: DecoderConfig) -> str | None:
    """The draft that a named target brings if none is named: the embedded model's head, or that of a short name."""
    if not isinstance(target, str) or not _can_use_draft_model(config):
        return None
    if target != EMBEDDED:
        named = named_model(target)
        return None if named is None else named.draft
    from slipstream.models.heads.head_files import EMBEDDED_NAME

    on_processor = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    # ranks of tensor parallelism must draft alike
    return EMBEDDED_NAME if on_processor and not config.load_options else None


def _at_hand(draft: str | None, config: DecoderConfig) -> str | None:
    """A draft model that the user has not named, downloaded; None, with a warning, if that fails."""
    try:
        if draft == EMBEDDED:
            place_of(draft)
        elif draft is not None:
            local_file(draft, load_options_of(config).for_draft(config.draft_dtype).extra)
    except SlipstreamError as error:
        log.warning("%s; drafting without it", error)
        return None
    return draft


def _check_exists(draft: Any, config: DecoderConfig) -> None:
    """Refuse a missing draft model before the target is loaded, which may take minutes."""
    from slipstream.models.heads.head_files import EMBEDDED_NAME

    if is_loaded(draft) or is_toy(draft) or _is_mtp(draft) or str(draft) == EMBEDDED_NAME:
        return
    file = local_file(str(draft), load_options_of(config).for_draft(config.draft_dtype).extra)
    if is_gguf(file):
        read_header(expanded(file))
    else:
        place_of(file)


def _can_use_draft_model(config: DecoderConfig) -> bool:
    name = config.drafter.partition(":")[0]
    return name == "auto" or (name in drafters.names() and drafters.traits(name).needs_draft_model)


def _brought_mtp(target: Loaded, config: DecoderConfig) -> Loaded | None:
    """The MTP layers in the target's checkpoint, if the drafter can use a draft model and none is named."""
    if not _can_use_draft_model(config) or PLAN in config.load_options:
        return None
    if not isinstance(target.backend, HiddenStates) or is_gguf(target.source):
        return None
    from slipstream.models.heads.mtp import brings_mtp, load_mtp

    options = load_options_of(config).with_draft_dtype(config.draft_dtype)
    if not brings_mtp(target, options):
        return None
    _refuse_settings_of_models(config, "the target's MTP layers")
    try:
        return load_mtp(target, options)
    except SlipstreamError as error:
        log.warning("%s; drafting without the MTP layers", error)
        return None


def parallel_mask(draft: Loaded) -> int | None:
    """The mask token of a draft model that was trained to score a whole draft at once; None for others."""
    if isinstance(draft.backend, HeadBackend):
        return draft.backend.mask_token
    model = getattr(draft.backend, "model", None)
    token = None if model is None else getattr(model.config, "pard_token", None)
    if token is None or is_whole(token, 0, draft.backend.vocab_size - 1):
        return token
    raise UsageError(
        f"draft model {draft.name!r} has pard_token={token!r}; allowed: 0 to {draft.backend.vocab_size - 1}"
    )


def _draft_session(draft: Loaded | None) -> Session | None:
    if draft is None:
        return None
    return HeadSession(draft.backend) if isinstance(draft.backend, FeatureReader) else make_session(draft.backend)


def _attach(draft: Loaded | None, target: Session) -> None:
    """Connect a draft head to the target whose hidden states it reads."""
    if draft is not None and isinstance(draft.backend, FeatureReader):
        assert isinstance(target.backend, HiddenStates)  # else it would not have been loaded
        draft.backend.attach(target.backend, target.slot_states)
        target.forget()  # no hidden states were kept of the texts that are cached


def _prepare(loaded: Loaded | None, config: DecoderConfig) -> None:
    if loaded is not None and isinstance(loaded.backend, PreparedForwards):
        loaded.backend.prepare(config.max_batch_size)


def load_options_of(config: DecoderConfig) -> LoadOptions:
    """Options with which the target is loaded."""
    of_target = {"activations": config.activations, "rounding": config.quantize}  # not of its draft model
    return LoadOptions(config.dtype, config.device, config.fast, config.load_options, **of_target)


def draft_options_of(config: DecoderConfig, target_device: torch.device) -> LoadOptions:
    """Options with which the draft model is loaded. target_device: set by the target's load options, if at all."""
    options = load_options_of(config).for_draft(config.draft_dtype, config.draft_vocabulary)
    if "device_map" in config.load_options and options.device == "auto":
        options = replace(options, device=str(target_device))  # the map names the target's layers
    return options


def load_draft(draft: Any, config: DecoderConfig, target: Loaded, tokenizer: Any) -> Loaded | None:
    """The draft model in its own precision, or the draft head; None if there is none.

    tokenizer: the draft model's; None if it comes with the model, or is not needed.
    """
    if draft is None:
        _refuse_settings_of_weights(config, "there is no draft model")
        return None
    if _is_mtp(draft):
        _refuse_settings_of_models(config, "the target's MTP layers")
        from slipstream.models.heads.mtp import load_mtp

        return load_mtp(target, load_options_of(config).with_draft_dtype(config.draft_dtype))
    options = draft_options_of(config, target.backend.device)
    if is_toy(draft):
        _refuse_settings_of_weights(config, "the toy model has no weights")
        return load(draft, options, tokenizer)
    from slipstream.models.heads.head_files import EMBEDDED_NAME, head_files

    if (files := head_files(draft, options)) is not None:
        from slipstream.models.heads.load import load_head

        _refuse_settings_of_models(config, f"the draft head {files.source!r}")
        head = load_head(files, target, options)
        if (trained_for := files.trained_for(target.name)) is not None:
            log.warning("draft head %r was trained for %r, not for %r", files.source, trained_for, target.name)
        agreement = None if files.source == EMBEDDED_NAME else remembered_agreement(head, target)
        if agreement is not None and agreement.is_warning:
            log.warning("%s", agreement.line(head.name, target.name))
        return head
    if is_loaded(draft) and config.draft_dtype not in ("auto", "int4", "int8"):
        what = "but the draft model is loaded already; allowed: auto, int4, int8"
        raise UsageError(f"draft_dtype={config.draft_dtype!r}, {what}")
    model = load(draft, options, tokenizer)
    _warn_of_size(target, model)
    settings = getattr(model.model, "config", None)
    if getattr(settings, "spd_type", None) == "pard2" or getattr(settings, "pard2", None) is True:
        what = "may draft with its target's hidden states: here it drafts without them, and fewer tokens are accepted"
        log.warning("draft model %r is one of PARD-2: it %s", model.name, what)
    return model


def _warn_of_size(target: Loaded, draft: Loaded) -> None:
    """Warn of a draft model whose forwards read as much as the target's.

    One that drafts several tokens in a forward may save time at any size.
    """
    if target.model is None or draft.model is None or parallel_mask(draft) is not None:
        return
    sizes = [num_weights_read(loaded.model.config.get_text_config()) for loaded in (target, draft)]
    reads = [(size or 0) * _bytes_per_weight(loaded) for size, loaded in zip(sizes, (target, draft), strict=True)]
    if reads[1] >= reads[0] and (comparison := larger(*sizes)):
        log.warning("draft model %r hardly saves time: it %s", draft.name, comparison)


def _bytes_per_weight(loaded: Loaded) -> float:
    model = loaded.model if loaded.view is None else loaded.view.model
    if parts := [part for linear in block_linears(model) for part in linear.parts]:
        num_bytes = sum(part.outputs * part.block.row_bytes(part.inputs) for part in parts)
        return num_bytes / sum(part.outputs * part.inputs for part in parts)
    dtype: torch.dtype = model.dtype
    return dtype.itemsize / (1 if rounded_activations(model) is None else QUANTIZED)


def _refuse_settings_of_models(config: DecoderConfig, head: str) -> None:
    """Refuse settings that a draft head does not have. head: its name in messages."""
    if PLAN in config.load_options:
        raise UsageError(f"load_options {PLAN!r} with {head}; allowed: a draft model")
    for name in OF_MODELS:
        if (value := getattr(config, name)) != "auto":
            raise UsageError(f"{name}={value!r} with {head}; allowed: 'auto', or another draft model")


def _refuse_settings_of_weights(config: DecoderConfig, what: str) -> None:
    if config.draft_dtype != "auto":
        raise UsageError(f"draft_dtype={config.draft_dtype!r}, but {what}; allowed: auto")
    if config.draft_vocabulary not in ("auto", "full"):
        raise UsageError(f"draft_vocabulary={config.draft_vocabulary!r}, but {what}; allowed: 'auto' or 'full'")
