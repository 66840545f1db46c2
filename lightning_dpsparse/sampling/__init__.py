"""Who is in a batch: Poisson samples of examples or users, by rank and by day."""
