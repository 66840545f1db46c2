"""Everything that touches TorchRec's sharding, FBGEMM's kernels and torch.distributed."""
