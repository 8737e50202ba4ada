"""The files that ckptctl itself writes: seals and marks."""
