"""What an engine rank wants of a version, found by letting the engine's own loader run over tensors that have no storage.

`Source` gives lazy tensors of which is fetched what is copied, while the loader runs. `record` writes down once what a loader takes and
where it puts it; from then on an `Update` is one pull straight to the parameters, without the loader.
"""

from weighbridge.lazy.recorder import Load, record
from weighbridge.lazy.recording import Recording
from weighbridge.lazy.remembered import remembered
from weighbridge.lazy.source import Source
from weighbridge.lazy.tensor import LazyTensor
from weighbridge.lazy.update import Update

__all__ = ["LazyTensor", "Load", "Recording", "Source", "Update", "record", "remembered"]
