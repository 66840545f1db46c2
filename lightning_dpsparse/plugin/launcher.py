"""Ranks that are started from within Python: start_method "spawn", "fork" or "forkserver".

Notebooks and scripts without a command line start ranks so. The process that starts them holds the
plain module, and Lightning sends the trained weights back to it. A sharded table cannot be sent as
it is, and weights must never travel without their history. So rank 0 gathers whole tables, and the
module that comes out of `fit` is a plain one: its tables hold the trained rows, and it knows what
was spent on them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher,
    _WorkerOutput,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing import ProcessRaisedException
from typing_extensions import override

from lightning_dpsparse.plugin.history import history_of, keep_history, keep_spent, spent_by
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.whole_state import gather_whole_state

_REFUSALS = ("lightning_dpsparse.refused.Refused: ", "lightning_dpsparse.budget.BudgetSpentError: ")


class ShardedLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of processes, for modules whose tables are sharded in them."""

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except ProcessRaisedException as error:
            refusal = _refusal_in(str(error))
            if refusal is None:
                raise
        raise Refused(refusal)  # outside of `except`: what it was raised by is another process

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        if trainer.state.fn != TrainerFn.FITTING:
            return super()._collect_rank_zero_results(trainer, results)
        module = trainer.lightning_module
        state = gather_whole_state(module)
        if state is None:
            return None
        path = Path(tempfile.mkdtemp()) / "module.pt"
        torch.save({"state": state, "history": history_of(module), "spent": spent_by(module)}, path)
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return _WorkerOutput(best, path, trainer.state, results, self.get_extra_results(trainer))

    @override
    def _recover_results_in_main_process(
        self, worker_output: _WorkerOutput, trainer: Trainer
    ) -> None:
        path = worker_output.weights_path
        if path is not None:
            # This run's own file, which holds more than tensors.
            found = torch.load(path, map_location="cpu", weights_only=False)
            module = trainer.lightning_module
            module.configure_model()
            module.load_state_dict(found["state"], strict=False)
            keep_history(module, found["history"])
            if found["spent"] is not None:
                keep_spent(module, found["spent"])
            Path(path).unlink()
            Path(path).parent.rmdir()
        super()._recover_results_in_main_process(worker_output._replace(weights_path=None), trainer)


def _refusal_in(report: str) -> str | None:
    """The message of a refusal, from the traceback that another process sent; None of another."""
    last = report.strip().splitlines()[-1] if report.strip() else ""
    return next((last.removeprefix(name) for name in _REFUSALS if last.startswith(name)), None)
