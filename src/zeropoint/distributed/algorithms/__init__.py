"""Algorithms of distributed training, at torch's paths."""
