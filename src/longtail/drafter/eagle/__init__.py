"""EAGLE: one decoder layer on the features of the target."""
