"""Tests of `weighbridge_storage.torch_dist`."""
