"""Trains a draft head for any target on texts that the target makes.

`texts` makes and keeps the texts, `trainable_head` is the head with its loss, `held_out` measures how fast it makes the
target, `training_run` runs the steps and keeps their state, and `training_job` puts these together.
"""
