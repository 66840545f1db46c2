"""Privacy on the command line, without training: calibrate, account and report.

`questions.py` turns options into a `PrivacyPlan` and asks `resolve` for the run that they describe,
so that the calculator prices a run exactly as training does. `answers.py` computes what is asked
for, `words.py` says it to people, and `commands.py` joins the three.
"""

from __future__ import annotations

from lightning_dpsparse.calculator.commands import account_main, calibrate_main, report_main

__all__ = ["account_main", "calibrate_main", "report_main"]
