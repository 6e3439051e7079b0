"""Tests of pages: what they say, who may see and do it, and how they look and behave in a real browser."""
