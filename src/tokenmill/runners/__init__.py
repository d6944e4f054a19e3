"""Where tasks run: this process, a pool of processes (`local`), or a Ray cluster (`ray`)."""
