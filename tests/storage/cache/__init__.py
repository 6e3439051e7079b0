"""Tests of `weighbridge_storage.cache`."""
