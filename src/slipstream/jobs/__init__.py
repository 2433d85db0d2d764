"""Batch jobs answer a file of requests line by line; a job that was killed at any moment continues where it stopped."""
