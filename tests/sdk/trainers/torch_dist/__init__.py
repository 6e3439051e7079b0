"""Tests of `weighbridge._trainers.torch_dist`."""
