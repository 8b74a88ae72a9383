"""What watches or intervenes while a run goes."""

from callbacks.bias_monitor import BiasMonitor
from callbacks.collapse_stop import CollapseStop
from callbacks.compute_account import ComputeAccount
from callbacks.delta_spectrum_monitor import DeltaSpectrumMonitor
from callbacks.direction_probe import DirectionProbe
from callbacks.divergence_stop import DivergenceStop
from callbacks.early_warning import EarlyWarning, Limit
from callbacks.error_shaping import ErrorShaping
from callbacks.gradient_drift_monitor import GradientDriftMonitor
from callbacks.head_spectrum_monitor import HeadSpectrumMonitor
from callbacks.last_bin_monitor import LastBinMonitor
from callbacks.logit_bound_monitor import LogitBoundMonitor
from callbacks.momentum_signs import MomentumSigns
from callbacks.operand_attribution import OperandAttribution
from callbacks.precision_switch import PrecisionSwitch
from callbacks.qk_guard import QKGuard
from callbacks.random_state import RandomState
from callbacks.resumed_checkpoints import ResumedCheckpoints
from callbacks.resumed_validation import ResumedValidation
from callbacks.route_splice import RouteSplice
from callbacks.run_progress_bar import RunProgressBar
from callbacks.run_recorder import RunRecorder
from callbacks.spectral_alignment_monitor import SpectralAlignmentMonitor
from callbacks.spectral_monitor import SpectralMonitor
from callbacks.step_profile import StepProfile
from callbacks.tied_row_monitor import TiedRowMonitor

__all__ = [
    "BiasMonitor",
    "CollapseStop",
    "ComputeAccount",
    "DeltaSpectrumMonitor",
    "DirectionProbe",
    "DivergenceStop",
    "EarlyWarning",
    "ErrorShaping",
    "GradientDriftMonitor",
    "HeadSpectrumMonitor",
    "LastBinMonitor",
    "Limit",
    "LogitBoundMonitor",
    "MomentumSigns",
    "OperandAttribution",
    "PrecisionSwitch",
    "QKGuard",
    "RandomState",
    "ResumedCheckpoints",
    "ResumedValidation",
    "RouteSplice",
    "RunProgressBar",
    "RunRecorder",
    "SpectralAlignmentMonitor",
    "SpectralMonitor",
    "StepProfile",
    "TiedRowMonitor",
]
