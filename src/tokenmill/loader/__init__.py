"""Cuts stores into rows and feeds them to training: order, layouts, mixtures, the loader."""
