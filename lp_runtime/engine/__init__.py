"""One replica's decoding: the engine, its step, the sequences, and what a request needs to become one."""
