"""Environments of GPU machines without a network, packed on a machine without a card."""

# - `pack`: a layer of packages, installed, stripped, checked and cut into files.
# - `stubs`: libraries of CUDA and its driver that answer nothing, with which packages can be imported.
# - `imports`: imports under a card that is not there.
