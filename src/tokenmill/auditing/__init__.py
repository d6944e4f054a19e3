"""`tokenmill audit`: what is wrong with the batches of anybody's loader."""
