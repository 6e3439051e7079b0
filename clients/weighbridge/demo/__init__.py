"""Demonstrations: real trainers and engines small enough for a laptop."""
