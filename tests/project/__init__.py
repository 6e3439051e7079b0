"""Tests of the repository itself: contract, documents, folders, public surface, benchmarks."""
