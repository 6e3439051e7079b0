"""Tests, named for the promise each one holds."""
