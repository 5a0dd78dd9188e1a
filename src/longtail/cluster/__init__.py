"""Workers: the requests and tasks of each, and the work of idle ones."""
