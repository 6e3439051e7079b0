"""``weighbridge follow``: an agent beside a running engine that takes it along with a ref.

`agent` decides, `engines` says what an engine must be able to do, and each engine's own way of doing it has a module of its own.
"""
