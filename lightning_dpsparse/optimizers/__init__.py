"""Optimizers of dense layers that know of the noise on their gradients."""
