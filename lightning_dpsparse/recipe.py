"""LightningCLI, fitted to recipes.

A recipe is a YAML file that names a model, its data and a trainer by class path, with their
arguments. LightningCLI turns it into objects and checks every argument against the signatures.
`RecipeCLI` adds two things: `--config` also takes the name of a recipe that comes with the package
(`recipe_files.py`), and `devices: auto` follows torchrun. `cli.py` calls it for `fit`, `validate`,
`test` and `predict`, and `audit/command.py` for `audit`.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch
import torch
from jsonargparse import ActionConfigFile
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightning_dpsparse.checks import check_whole
from lightning_dpsparse.command_line import in_one_line
from lightning_dpsparse.recipe_files import check_recipe_text, find_recipe
from lightning_dpsparse.refused import Refused

_LARGEST_SEED = 2**32 - 1


class RecipeParser(LightningArgumentParser):
    """Lightning's parser, whose errors are one line and no page."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        prog = (getattr(ex, "subcommand_parser", None) or self).prog.replace(" [options]", "")
        self.exit(2, f"{prog}: error: {in_one_line(message)}. See {prog} --help.\n")
        raise AssertionError("exit never returns")


class ActionRecipe(ActionConfigFile):
    """`--config`: the path of a recipe, the name of a shipped one, or settings as YAML text."""

    @override
    def __call__(
        self, parser: Any, cfg: Any, values: Any, option_string: str | None = None
    ) -> None:
        # Settings that are written out in place of a path have a colon; jsonargparse reads them.
        found = values if ":" in values else str(find_recipe(values))
        try:
            check_recipe_text(found if ":" in values else Path(found).read_text(encoding="utf-8"))
            super().__call__(parser, cfg, found, option_string)
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(
                f"Expected a recipe that can be read as text at {found!r}, found none ({error}). "
                "Name a YAML file in UTF-8."
            ) from error


class RecipeCLI(LightningCLI):
    """Runs any LightningModule on any LightningDataModule; a recipe names both by class path."""

    def __init__(self, description: str = "", **kwargs: Any) -> None:
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "lightning-dpsparse", "description": description},
            **kwargs,
        )

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """As Lightning does it, except that `--config` takes names of recipes too."""
        kwargs.setdefault("dump_header", [f"lightning.pytorch=={lightning.pytorch.__version__}"])
        parser = RecipeParser(**kwargs)
        parser.add_argument(
            "-c",
            "--config",
            action=ActionRecipe,
            help="A YAML file, or the name of a recipe that comes with the package. "
            "`lightning-dpsparse recipes` lists these.",
        )
        return parser

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        command = self.config.get("subcommand")  # `self.subcommand` is set after this
        seed = (self.config[command] if command else self.config).get("seed_everything")
        if seed is not None and not isinstance(seed, bool):
            check_whole("seed_everything", seed, 0, _LARGEST_SEED)

    @override
    def _parse_ckpt_path(self) -> None:
        """As Lightning does it, except that a file which is no checkpoint is one line."""
        try:
            super()._parse_ckpt_path()
        except Exception as error:  # torch raises nearly anything over another kind of file
            command = self.config["subcommand"]
            raise Refused(
                f"Expected a checkpoint at {str(self.config[command]['ckpt_path'])!r}, found a "
                f"file that cannot be read as one ({type(error).__name__}). Name the directory "
                "that a run saved, or a file that `consolidate` wrote."
            ) from error

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """As Lightning does it, except that settings which the Trainer refuses are one line."""
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
            if isinstance(error, Refused):
                raise
            raise _as_refusal(error) from error

    @override
    def instantiate_classes(self) -> None:
        """As Lightning does it, except that the error of a constructor stays what it is."""
        make = _MakeObject()
        self.parser.add_instantiator(make, object, subclasses=True)
        try:
            super().instantiate_classes()
            return
        except _PassingRefusal as passing:
            refusal = passing.refusal
        except ValueError as error:
            # Lightning makes the model and the data itself; jsonargparse keeps their first error.
            if not isinstance(error.__cause__, Refused):
                raise error from make.error or error.__cause__
            refusal = error.__cause__
        raise refusal  # outside of `except`, so that jsonargparse's error is not shown with it

    @override
    def before_instantiate_classes(self) -> None:
        """Under torchrun, `devices: auto` means the processes that torchrun started."""
        trainer = self._get(self.config, "trainer")
        if TorchElasticEnvironment.detect() and trainer.devices == "auto":
            local = int(os.environ["LOCAL_WORLD_SIZE"])
            trainer.devices = local
            trainer.num_nodes = int(os.environ["WORLD_SIZE"]) // local


@contextmanager
def recipe_session() -> Iterator[None]:
    """Run a recipe inside this block: without noise in the log, and with a process group that ends.

    A run starts a process group. One that was there before the block is left as it is.
    """
    hide_upstream_warnings()
    had_group = torch.distributed.is_initialized()
    try:
        yield
    except MisconfigurationException as error:  # by its name, a mistake in the settings
        raise _as_refusal(error) from error
    finally:
        if not had_group and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def hide_upstream_warnings() -> None:
    """Hide warnings of Lightning and torch about which the user of a recipe can do nothing."""
    for message in (
        ".*isinstance.treespec, LeafSpec.*is deprecated.*",  # Lightning and torch's pytree
        ".*does not have many workers which may be a bottleneck.*",
        ".*args parameter is intended to run from within Python.*",  # `audit` does, by design
        ".*DistributedSampler. with the dataloaders.*",  # this strategy replaces that sampler
    ):
        warnings.filterwarnings("ignore", message)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_no_advertisement)


def _as_refusal(error: Exception) -> Refused:
    said = " ".join(str(error).split()).rstrip(".")
    return Refused(
        f"Expected settings that Lightning's Trainer takes, found that it refuses them: {said}. "
        "Change what is under trainer."
    )


class _PassingRefusal(BaseException):
    """Carries a refusal past `except Exception`."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class _MakeObject:
    """Makes an object of a recipe, and saves the error of its constructor from jsonargparse.

    An argument of several types (`str | Strategy`) is tried with one after the other. jsonargparse
    catches every `Exception` on the way, and raises a page of text about all the types at the end.
    """

    error: Exception | None = None
    """The latest error of a constructor that was no refusal."""

    def __call__(self, class_type: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            return class_type(*args, **kwargs)
        except Refused as refusal:
            raise _PassingRefusal(refusal) from None
        except Exception as error:
            self.error = error
            raise


def _no_advertisement(record: logging.LogRecord) -> bool:
    return "Tip:" not in record.getMessage()
