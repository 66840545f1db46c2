"""The Lightning side: the strategy, its refusals, loaders and callbacks."""
