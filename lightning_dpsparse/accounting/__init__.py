"""What a run costs.

`events.py` and `charges.py` say what was done to the data, `privacy_loss.py` turns events into
distributions of the privacy loss, `calibration.py` turns those into epsilon and epsilon into noise,
and `ledger.py` keeps what a model's training has cost so far.
"""
