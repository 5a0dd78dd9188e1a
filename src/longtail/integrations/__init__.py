"""longtail inside other frameworks: one package for each of them."""
