"""Mechanisms: which numbers of a step get a gradient and noise, and what that costs.

Noise on every row of every table hides best which rows an example read, but it is slow and buries
rows that few examples read. The mechanisms differ in what they do about that. Each is one file or
folder: `eana.py` is the smallest and `dpsgd.py` the one to compare with; `lazydp/`, `adafest.py`,
`fest.py` and `exponential.py` are for tables; `lsg.py` and `sparse_dpsgd.py` are for dense layers.
What a mechanism must provide is in `engine/mechanism.py`.
"""

from __future__ import annotations

TABLE_MECHANISMS = {
    "AdaFEST": "lightning_dpsparse.mechanisms.adafest",
    "AdaFESTPlus": "lightning_dpsparse.mechanisms.fest",
    "DPSGD": "lightning_dpsparse.mechanisms.dpsgd",
    "EANA": "lightning_dpsparse.mechanisms.eana",
    "ExponentialSelection": "lightning_dpsparse.mechanisms.exponential",
    "FEST": "lightning_dpsparse.mechanisms.fest",
    "LazyDP": "lightning_dpsparse.mechanisms.lazydp",
}
"""Public name of every mechanism for tables, with the module that defines it. The package takes its
public names from here, and `calibrate` and `account` offer these mechanisms: a new one is listed
here once."""
