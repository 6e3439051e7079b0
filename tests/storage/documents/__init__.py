"""Tests of `weighbridge_storage.documents`."""
