"""Tests of `weighbridge._trainers`."""
