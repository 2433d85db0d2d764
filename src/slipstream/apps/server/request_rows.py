"""From rendered prompts to the rows of a request: lengths, seeds and options checked before anything is queued."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from slipstream.apps.server.answer_forms import answer_constraint, form_field, told_as
from slipstream.apps.server.error_objects import refused
from slipstream.apps.server.live_request import Job, LiveRequest
from slipstream.apps.server.prompt_rendering import Rendered
from slipstream.apps.server.request_fields import ChatFields, CompletionFields, SamplingFields
from slipstream.apps.server.sampling_fields import sampling_params, wanted_logprobs
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.constraints.compiled_grammars import CompiledGrammars
from slipstream.decoder import SpeculativeDecoder
from slipstream.text.detokenizer import Tokenizer
from slipstream.text.requests import RequestReader, further_seeds

LIMITING = ("allowed_token_ids", "bad_words", "min_tokens", "logit_bias")  # what can leave no token beside a form
COMPLETION_TOKENS = 16  # OpenAI's default of the completions endpoint


@dataclass(frozen=True)
class RowMaker:
    """Makes rows for one decoder under the server's limits."""

    decoder: SpeculativeDecoder
    settings: ServerSettings
    grammars: CompiledGrammars

    @classmethod
    def of(cls, decoder: SpeculativeDecoder, settings: ServerSettings) -> RowMaker:
        """With compiled grammars of its own, and a tokenizer for them: requests are read beside the engine."""
        target = replace(decoder.target, tokenizer=deepcopy(decoder.tokenizer))
        return cls(decoder, settings, CompiledGrammars(target, target.backend.vocab_size))

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together."""
        context = self.decoder.target.backend.max_length
        return min(context, self.settings.max_model_len) if self.settings.max_model_len else context

    def jobs(
        self, live: LiveRequest, fields: SamplingFields, prompts: Sequence[Rendered], tokenizer: Tokenizer | None
    ) -> list[Job]:
        """One job per prompt and choice, in the order of choices. UsageError or ApiError says what is not allowed.

        tokenizer: of the calling thread; the decoder's own is the engine's, which decodes with it.
        """
        jobs: list[Job] = []
        for number, prompt in enumerate(prompts):
            self._check_ids(number, prompt.ids)
            for job in self._of_prompt(live, fields, prompt, tokenizer):
                job.choice = len(jobs)
                jobs.append(job)
        return jobs

    def _check_ids(self, number: int, ids: Sequence[int]) -> None:
        size = self.decoder.target.backend.vocab_size
        if bad := [token for token in ids if not 0 <= token < size]:
            raise refused(f"prompt {number}: token id {bad[0]}; allowed: 0 to {size - 1}", "prompt")

    def _of_prompt(
        self, live: LiveRequest, fields: SamplingFields, prompt: Rendered, tokenizer: Tokenizer | None
    ) -> list[Job]:
        wanted = self._max_tokens(fields, len(prompt.ids))
        target, cannot = self.decoder.target, self.decoder.reader.no_predictions
        params = sampling_params(fields, wanted, target.backend.vocab_size, answer_constraint(fields, tokenizer))
        params = RequestReader(replace(target, tokenizer=tokenizer), cannot).with_token_ids(params)
        if params.prediction is not None and len(params.prediction) > self.max_model_len:
            raise refused(
                f"prediction has {len(params.prediction)} tokens; allowed: at most {self.max_model_len}", "prediction"
            )
        reader = RequestReader(target, cannot, self.grammars)  # given ids alone, it encodes nothing
        with told_as(form_field(fields) or "constraint"):
            rows = [reader.rows([prompt.ids], params)[0] for _ in range(fields.n or 1)]
        for row, seed in zip(rows[1:], further_seeds(rows[0].seed, fields.n or 1), strict=True):
            row.seed = seed
        echo = wanted_logprobs(fields) if isinstance(fields, CompletionFields) and fields.echo else None
        for row in rows:
            row.messages, row.group = prompt.messages, live.group
        limits = next((name for name in LIMITING if getattr(fields, name)), form_field(fields))
        return [Job(live, 0, row, echo, generate=wanted > 0, limits=limits) for row in rows]

    def _max_tokens(self, fields: SamplingFields, prompt: int) -> int:
        """How long an answer may be; 0 for none."""
        if not prompt:
            raise refused("the prompt is empty; allowed: at least one token", "prompt")
        wanted, name = fields.max_tokens, "max_tokens"
        if isinstance(fields, ChatFields):
            if fields.max_completion_tokens is not None:
                wanted, name = fields.max_completion_tokens, "max_completion_tokens"
            default = self.settings.default_max_tokens
        else:
            default = COMPLETION_TOKENS
        echoed = isinstance(fields, CompletionFields) and fields.echo
        if wanted == 0 and not echoed:
            raise refused(f"{name}=0; allowed: at least 1, or 0 with echo=true", name)
        room = self.max_model_len - prompt
        needed = 1 if wanted is None else wanted
        if needed > room:
            raise refused(
                f"This model's maximum context length is {self.max_model_len} tokens; {prompt} of the prompt and "
                f"{name}={needed} exceed it",
                name if room > 0 else "prompt" if isinstance(fields, CompletionFields) else "messages",
                "context_length_exceeded",
            )
        return min(default, room) if wanted is None else wanted
