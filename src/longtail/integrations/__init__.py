"""longtail inside other libraries; each module needs the library of its name."""
