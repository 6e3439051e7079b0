"""Tests of `weighbridge_storage.versions`."""
