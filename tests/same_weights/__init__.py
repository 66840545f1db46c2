"""Whether two versions of the package train the same weights, bit for bit.

A refactoring must not change a number. `python -m tests.same_weights` runs every recipe, every
mechanism on every placement, and every other feature once, each for ten steps with a fixed key, and
keeps the dense parameters and the whole tables that come out:

    python -m tests.same_weights against HEAD~3      # that commit with the working tree
    python -m tests.same_weights record FILE         # or in two steps
    python -m tests.same_weights compare FILE --tolerance 'recipe/*=1e-6'
    python -m tests.same_weights --list --only 'placement/LazyDP/*'

Only public names of the package are used, so that the same cases run on old and new versions.
Weights depend on the machine and on the version of torch too: compare files on the machine that
recorded them. Read `cases.py` first; `tiny.py` has the model, `recipes.py` the recipes, `ranks.py`
the processes that train.
"""
