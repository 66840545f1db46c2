"""The algorithm: norms, clipping, weighted gradients. No process group, TorchRec or Lightning."""
