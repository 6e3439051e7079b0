"""Tests of `weighbridge_storage.head`."""
