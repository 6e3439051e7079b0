"""Tests of `weighbridge_storage.memory`."""
