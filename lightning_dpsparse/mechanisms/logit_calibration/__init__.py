"""Calibration of a click model's logits by one private query after the last step.

Clipping favours the common label, so that a privately trained model predicts too few clicks, or too
many. Its order of examples is still good. One line repairs the rest: logit -> slope * logit + bias
(Platt 1999). The line is fitted to a histogram of the training data's logits, which gets noise and
is charged like a step. A model with several tasks has a histogram and a line for each of them, and
one query with one price for all.

Read next: `description.py`, the settings and the price; `histogram.py`, what is counted;
`platt.py`, the line. `plugin/run_calibration.py` makes the query in a run.
"""

from lightning_dpsparse.mechanisms.logit_calibration.description import LogitCalibration

__all__ = ["LogitCalibration"]
