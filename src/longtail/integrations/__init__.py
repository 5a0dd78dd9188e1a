"""longtail inside other frameworks: one module or package for each of them."""
