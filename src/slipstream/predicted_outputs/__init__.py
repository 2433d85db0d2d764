"""Predicted outputs: a text that the caller expects, most of it, is proposed before any drafter is asked."""
