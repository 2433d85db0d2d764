"""The drafter "cross_vocabulary": a draft model of another vocabulary than the target's."""

from slipstream.drafters.cross_vocabulary.cross_vocabulary_drafter import TRAITS, CrossVocabularyDrafter, build

__all__ = ["TRAITS", "CrossVocabularyDrafter", "build"]
