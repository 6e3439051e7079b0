"""Tests of the demonstration, whose Megatron models other tests use as references."""
