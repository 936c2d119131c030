"""Model families, and the weights they run with."""
