"""One replica's decoding: the loop over steps, and running requests, alone and in batches."""
