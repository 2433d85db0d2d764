"""What a drafter declares about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a drafter declares about itself. `auto`, `--help`, the bench and the tests go by this and by no name.

    samples: sampled rows get drafts that are sampled from a distribution of its own (`Draft.probs`) under rules other
    than `match`. Under `match`, and under `auto` where it is one of ours (`Setup.coupled`), every draft is one-hot.
    costs_time: each drafted token takes a forward of a model; else drafts cost nothing but their verification.
    weighs_costs: it compares costs itself while it drafts, so that the policy need not before.
    reads_prompt: it has a KV cache of its own that must read a text before the first draft.
    knows_probs: it knows a probability of each token it drafts, by which it can stop early.
    default_length: tokens per round where neither the user nor measured costs say how many.
    preference: `auto` takes the drafter of the highest preference whose needs are met; 0 is never taken.
    needs_draft_model, needs_costs: what must be there for that.
    branches: it proposes tokens beside those of its chains, where trees are verified.
    other_vocabulary: it is for draft models of another vocabulary, for which those of the same one build it.
    in_other_engines: inference engines have it too, so `tune` compares it, and says how to set it there.
    """

    samples: bool = True
    costs_time: bool = True
    weighs_costs: bool = False
    reads_prompt: bool = False
    knows_probs: bool = False
    default_length: int = 5
    preference: int = 0
    needs_draft_model: bool = False
    needs_costs: bool = False
    branches: bool = False
    other_vocabulary: bool = False
    in_other_engines: bool = False


@runtime_checkable
class Declared(Protocol):
    """Optional of a drafter object that users pass in: its traits. One without is taken to have the defaults."""

    @property
    def traits(self) -> Traits:
        """What it declares about itself."""
