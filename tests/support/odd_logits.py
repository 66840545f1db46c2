"""Logits and labels of all kinds, and a histogram with few bins to count them in."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from lightning_dpsparse.mechanisms.logit_calibration import LogitCalibration

FEW = LogitCalibration(noise_multiplier=2.0, bins=6, largest_logit=3.0)
CPU = torch.device("cpu")

LOGITS = st.floats(-6, 6, width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 3.0, -3.0])
LABELS = st.sampled_from([0.0, 1.0, 0.5, -1.0, 7.0, math.nan])
