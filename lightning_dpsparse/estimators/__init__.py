"""Private means and linear models of wide, sparse data, on a CPU.

Noise on a mean of D columns grows with D, even if every example has only a few non-zeros. The
estimators here use the sparsity, so that their errors grow with the logarithm of D only. `mean.py`
is the plain mechanism; `projection.py`, `sketch.py` and `bias_reduced.py` improve on it, and
`output.py` perturbs the minimum of a convex loss. `release.py` is the only file that draws noise.
`linear_model.py` is the model for users, with the interface of scikit-learn.

The reference for all is the poster of Ghazi, Guzman, Kamath, Kumar and Manurangsi 2024,
Differentially Private Optimization with Sparse Gradients (arXiv:2404.10881). Its noise is for one
example replaced and by the classical calibration; here one example is added or removed, and the
noise comes from this package's accounting.
"""

from lightning_dpsparse.estimators.bias_reduced import (
    Levels,
    bias_reduced_mean,
    draw_levels,
    event_of_bias_reduced,
)
from lightning_dpsparse.estimators.calibration import noise_multiplier_for, spent_epsilon
from lightning_dpsparse.estimators.linear_model import DPLinearModel
from lightning_dpsparse.estimators.mean import event_of_mean, noisy_mean
from lightning_dpsparse.estimators.output import (
    event_of_output,
    minimise,
    perturbed_minimiser,
)
from lightning_dpsparse.estimators.projection import event_of_projection, projected_mean
from lightning_dpsparse.estimators.sketch import draw_sketch, event_of_sketch, sketched_mean

__all__ = [
    "DPLinearModel",
    "Levels",
    "bias_reduced_mean",
    "draw_levels",
    "draw_sketch",
    "event_of_bias_reduced",
    "event_of_mean",
    "event_of_output",
    "event_of_projection",
    "event_of_sketch",
    "minimise",
    "noise_multiplier_for",
    "noisy_mean",
    "perturbed_minimiser",
    "projected_mean",
    "sketched_mean",
    "spent_epsilon",
]
