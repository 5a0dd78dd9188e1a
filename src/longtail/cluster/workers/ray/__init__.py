"""Workers as Ray actors: the only package that imports Ray."""
