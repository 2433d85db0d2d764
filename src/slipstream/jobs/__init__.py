"""Batch jobs: a file of requests is answered line by line; killed at any moment, a job goes on where it stopped."""
