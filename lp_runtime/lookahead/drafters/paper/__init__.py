"""The paper's drafter: the Jacobi window and the n-gram pool."""
