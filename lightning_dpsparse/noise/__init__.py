"""Where noise comes from: secret keys, streams that never meet, and three kinds of source.

Noise protects only if nobody can guess it, if no two uses share it, if its distribution is known,
and if the low bits of a noisy number give nothing away.

Read next: `keys.py`, the secret and the names of streams; `sources.py`, the three sources;
`keystream.py`, the distribution of a draw; `grid.py`, the low bits.
"""
