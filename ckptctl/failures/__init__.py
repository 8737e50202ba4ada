"""Infrastructure or job? What logs, exit codes and schedulers say of a failure."""
