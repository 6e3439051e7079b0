"""Tests of training states in memory."""
