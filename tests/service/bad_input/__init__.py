"""Tests of what a service makes of bad input, over any face."""
