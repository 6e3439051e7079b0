"""Tests of `weighbridge_service.fsck`."""
