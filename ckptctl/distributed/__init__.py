"""One verdict from many processes."""
