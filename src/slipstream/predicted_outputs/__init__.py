"""Predicted outputs: the caller's guess of the output is drafted before any drafter is asked."""
