"""Where noise goes: one file a mechanism."""
