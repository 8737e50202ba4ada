"""Process groups and launcher environments: one result from many processes."""
