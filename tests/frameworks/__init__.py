"""Tests of adapters to frameworks of reinforcement learning, inside these frameworks."""
