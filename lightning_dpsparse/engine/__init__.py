"""The algorithm of a private step in plain PyTorch: norms, clipping, clipped sums and noise.

Nothing here uses process groups, TorchRec or Lightning: `sharded/` hands in what the tables read,
and `plugin/` calls the step from a training loop.

Read next: `step.py`, a whole step on a page; `norms.py` and `rows.py`, the tables; `ghost.py`, the
dense layers; `mechanism.py` and `state.py`, what a new mechanism has to define.
"""
