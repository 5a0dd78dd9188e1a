"""One engine step: the flat batch, the forward pass, the draws."""
