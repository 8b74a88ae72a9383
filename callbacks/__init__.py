"""What watches or intervenes while a run goes."""

from callbacks.collapse_stop import CollapseStop
from callbacks.direction_probe import DirectionProbe
from callbacks.early_warning import EarlyWarning, Limit
from callbacks.error_shaping import ErrorShaping
from callbacks.qk_guard import QKGuard
from callbacks.random_state import RandomState
from callbacks.resumed_validation import ResumedValidation
from callbacks.route_splice import RouteSplice
from callbacks.run_progress_bar import RunProgressBar
from callbacks.run_recorder import RunRecorder
from callbacks.spectral_monitor import SpectralMonitor

__all__ = [
    "CollapseStop",
    "DirectionProbe",
    "EarlyWarning",
    "ErrorShaping",
    "Limit",
    "QKGuard",
    "RandomState",
    "ResumedValidation",
    "RouteSplice",
    "RunProgressBar",
    "RunRecorder",
    "SpectralMonitor",
]
