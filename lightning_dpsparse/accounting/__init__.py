"""What a run costs: events, privacy loss distributions, calibration, and the ledger."""
