"""Tests of `weighbridge_storage.stores`."""
