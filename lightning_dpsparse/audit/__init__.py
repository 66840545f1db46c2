"""Attacks on a trained model, which measure what it leaks.

Accounting proves that a model leaks little; an audit checks the code that should keep the proof.
`command.py` is the command line. `one_run.py` and `bound.py` give a lower bound on epsilon from one
training run, `secret_sharer.py` and `exposure.py` measure how well a model remembers single
examples, and `low_bits.py` attacks the last digits of released numbers. `canaries.py` puts the
examples into the data that the attacks look for.
"""
