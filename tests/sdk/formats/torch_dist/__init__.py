"""Tests of `weighbridge._formats.torch_dist`."""
