"""Tests of what crosses packages: crashes, faults, round trips."""
