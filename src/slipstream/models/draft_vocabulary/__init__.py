"""Draft models that score a part of their vocabulary: a cheaper output layer, whose drafts stay exact."""
