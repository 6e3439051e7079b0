"""Tests of `weighbridge_storage.migration`."""
