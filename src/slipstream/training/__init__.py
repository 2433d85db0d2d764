"""Trains a draft head for any target on texts that the target makes.

`texts` makes and keeps the texts, `trainable_head` is the head with its loss, `held_out` says how fast it makes the
target, `training_run` goes through the steps and keeps their state, `training_job` is the whole.
"""
