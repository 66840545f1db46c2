"""Everything that touches TorchRec's sharding, FBGEMM's kernels and torch.distributed.

The engine computes a private step from ids, gradients and noise, and needs no process group. This
package brings it what tables that are spread over ranks read, and hands the updates back to them.

Read next: `cut.py`, where lookups are cut off from the model; `private.py`, the private steps of a
run; `build.py` and `placement.py`, how tables get to ranks; `kernel.py` and `upstream.py`, all that
is used of FBGEMM's and TorchRec's own fields; `checkpoint.py`, how a model is saved.
"""
