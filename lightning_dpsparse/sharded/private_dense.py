"""The dense layers of a module in private training: which learn, in which form, and what they got.

A layer may be frozen and thawed during training. So every step first asks which parameters learn,
and then captures and releases the gradients of these only. A dense mechanism may also change the
form of a layer's gradient from step to step (`engine/dense.py`).
"""

from __future__ import annotations

from torch import Tensor, nn

from lightning_dpsparse.engine.constants import Constants
from lightning_dpsparse.engine.dense import DenseForms, DenseMechanism
from lightning_dpsparse.engine.ghost import DenseCapture, padding_rows
from lightning_dpsparse.noise.sources import NoiseSource
from lightning_dpsparse.sharded.dense_parameters import DenseParameters


class PrivateDense:
    """The dense layers of a module, from the first private step to `close`."""

    def __init__(self, module: nn.Module, mechanism: DenseMechanism) -> None:
        self._module, self._mechanism = module, mechanism
        self.parameters = DenseParameters(module)
        self._padding = padding_rows(module)
        self._constants = Constants(module.buffers())
        self.released: dict[int, tuple[Tensor, int]] = {}
        """The gradient that each parameter got last, and its version then, by id(parameter)."""
        self._take_parameters()

    def _take_parameters(self) -> None:
        trainable = self.parameters.trainable
        self.capture = DenseCapture(trainable, self._constants)
        self._forms = DenseForms(self._mechanism, self._module, trainable)
        self.flat = self.capture.new_flat()
        """Memory for the sums of all layers. It is kept: new memory would cost more time."""

    def start_step(self, step: int, noise: NoiseSource) -> bool:
        """Choose the forms of the step. Returns whether other parameters than before learn."""
        has_changed = self.parameters.follow()
        if has_changed:
            self._take_parameters()
        self.capture.set_forms(self._forms.at(step, noise))
        if self.flat.numel() != self.capture.size:
            self.flat = self.capture.new_flat()
        return has_changed

    def forget_gradients(self) -> None:
        for parameter in self.capture.parameters.values():
            parameter.grad = None

    def note_released(self) -> None:
        """Note the gradients that the step has left on the parameters."""
        for parameter, row in self._padding:
            if parameter.grad is not None:
                parameter.grad[row] = 0.0  # noise would move the padding row
        gradients = ((id(p), p.grad) for p in self.capture.parameters.values())
        self.released = {key: (g, g._version) for key, g in gradients if g is not None}

    def close(self) -> None:
        """Make the layers ordinary ones again."""
        self.parameters.close()
