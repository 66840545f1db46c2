"""Attacks on a trained model: what leaks, measured."""
