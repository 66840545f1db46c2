"""Where noise goes: one file a mechanism, and the list of those that update tables."""

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
