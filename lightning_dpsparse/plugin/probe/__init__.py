"""Measures whether every example's loss depends on that example alone, before a release.

`coupling` says what is measured and when. `subjects` and `sources` make batches of some examples,
`bench` and `compare` run and compare them, `repeatable` makes passes repeatable, and `findings` has
the words for what is found.
"""
