"""Where noise comes from: secret keys, streams that never meet, and three kinds of source."""
