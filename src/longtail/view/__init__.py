"""`longtail view`: a live web page beside a running or finished run, made from its files."""
