"""Sources, engines, store and runners joined: the verbs `build`, `plan` and `verify`."""
