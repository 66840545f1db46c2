"""The one exception that is meant for users.

`Refused` says that this package will not do what it was asked to do: a setting is wrong, a promise
of privacy could not be kept, a file is not there. Its message gives what was expected, what was
found, and what to do. The command line shows it as one line; every other exception is a fault of
the program, and keeps its traceback.

Where a refusal lives: beside the code whose assumption it protects, checked as early as that code
can know. A setting is checked where it is set (`__post_init__`), by the checks of `checks.py`. What
depends on the model, the trainer or the data is checked in the `refusals.py` of the layer that
knows them, before the first step. What can only be seen in a step is checked in that step, before
anything is released.
"""

from __future__ import annotations


class Refused(ValueError):  # noqa: N818 (it is no error: nothing went wrong)
    """This package will not do what it was asked to: what it expected, what it found, a remedy.

    Guarantees: the message is one line, and every character of it can be seen.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(spell_out(str(message)))


def spell_out(text: str) -> str:
    """The text in one line. Characters that cannot be seen, such as escapes, are spelled out.

    >>> print(spell_out("a\\nb \\x1b[31m"))
    a\\nb \\x1b[31m
    """
    return "".join(c if c.isprintable() else _spell(c) for c in text)


def _spell(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
