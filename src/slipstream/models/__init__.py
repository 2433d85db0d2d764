"""Models with a slot-addressed key-value cache, and how a name becomes one."""
